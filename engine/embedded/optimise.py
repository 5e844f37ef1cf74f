"""Muon for the hidden matrices and Adam for everything else."""

from collections import defaultdict

import torch

from engine.embedded.geometry import Geometry
from engine.embedded.train_model import is_matrix

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MUON_RATE, ADAM_RATE = 4e-3, 3e-3
MOMENTUM, WEIGHT_DECAY = 0.95, 0.05
ADAM_BETAS, ADAM_EPS = (0.9, 0.95), 1e-10


def is_hidden_matrix(name: str, value: torch.Tensor) -> bool:
    return is_matrix(name, value) and not name.endswith(("embed", "head", ".router", ".shared_gate", ".a", ".b"))


def as_matrices(name: str, value: torch.Tensor, width: int) -> torch.Tensor:
    """[matrices, rows, columns]: experts that lie side by side are separate matrices; a view of `value`."""
    if name.endswith((".gate", ".up")):
        return value.view(-1, width, value.shape[-1])
    if name.endswith(".down"):
        return value.view(value.shape[0], -1, width).transpose(0, 1)
    return value.unsqueeze(0)


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with all singular values near 1, by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    is_tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if is_tall else x).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if is_tall else y).float()


class Optimiser:
    """One step over the whole dictionary; the learning rates follow one factor from outside."""

    def __init__(self, parameters: dict[str, torch.Tensor], geometry: Geometry):
        hidden = {name: value for name, value in parameters.items() if is_hidden_matrix(name, value)}
        others = [value for name, value in parameters.items() if name not in hidden]
        fused = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, ADAM_RATE, ADAM_BETAS, ADAM_EPS, weight_decay=0.0, fused=fused)
        self.groups: dict[tuple, list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, value in hidden.items():
            shape = as_matrices(name, value.detach(), geometry.expert_width).shape[1:]
            self.groups[tuple(shape)].append((name, value))
        self.width = geometry.expert_width
        self.momenta: dict[tuple, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self.adam.step()
        for shape, members in self.groups.items():
            self.step_muon(shape, members, MUON_RATE * factor)

    def step_muon(self, shape: tuple, members: list[tuple[str, torch.Tensor]], rate: float) -> None:
        pieces = [as_matrices(name, value.grad, self.width) for name, value in members]
        gradient = torch.cat(pieces)
        momentum = self.momenta.setdefault(shape, torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalise(gradient.lerp(momentum, MOMENTUM)) * (0.2 * max(shape) ** 0.5)
        for (name, value), piece in zip(members, update.split([len(piece) for piece in pieces]), strict=True):
            value.mul_(1 - rate * WEIGHT_DECAY)
            as_matrices(name, value, self.width).sub_(piece, alpha=rate)

    def zero_grad(self) -> None:
        self.adam.zero_grad()
        for members in self.groups.values():
            for _, value in members:
                value.grad = None

    def state(self) -> dict:
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load_state(self, state: dict) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momenta = state["momenta"]
