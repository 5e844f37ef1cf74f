"""The layers whose matrices are stored in 4 or 8 bits; each takes the place of the one it is named after."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.ops.expert_choice import expert_choice
from engine.ops.quantize_rows import QuantizedRows, quantize_rms_norm, quantize_rows, quantize_silu_mul
from engine.ops.quantized_embedding import quantized_embedding
from engine.ops.quantized_experts import QuantizedExperts, quantized_experts
from engine.ops.quantized_grouped import quantized_grouped_experts
from engine.ops.quantized_linear import quantized_linear
from engine.ops.quantized_matmul import quantized_matmul, quantized_mlp
from engine.ops.quantized_weight import QuantizedWeight
from engine.ops.router_logits import router_logits
from engine.ops.row_matmul import row_matmul


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """y = W norm(x) + residual, the matrices one above the other; norm(x) is rounded to 8 bits once.

    The rows of a prompt are not rounded: by what they are and not by how many, so that
    what is computed again after a prefix is computed as it was the first time.

    dtype  of y; that of x when not given
    """

    weights: tuple[QuantizedWeight, ...]
    dtype: torch.dtype | None = None

    def __call__(
        self,
        x: torch.Tensor | QuantizedRows,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        *,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """x         rounded to 8 bits, once; or rounded already, where y has the type of self or of the residual
        residual  only where there is one matrix
        """
        if is_prompt:
            x, ordered = norm.of_prompt(x) if norm else (x, None)
            return quantized_matmul(x, self.weights, self.dtype or x.dtype, residual, ordered)
        like = residual if isinstance(x, QuantizedRows) else x
        return quantized_linear(_rounded(x, norm), self.weights, self.dtype or like.dtype, residual)

    @property
    def is_halved(self) -> bool:
        """Whether a prompt's rows are read as halved puts them, and only so."""
        return all(weight.bits == 4 for weight in self.weights)

    def of_prompt(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Over rows that were written for it: halved where is_halved."""
        return quantized_matmul(x, self.weights, residual.dtype, residual, x if self.is_halved else None)


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """weight  may lie in pinned host memory"""

    weight: QuantizedWeight
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return quantized_embedding(token_ids, self.weight, self.dtype)


@dataclass(frozen=True, slots=True)
class QuantizedMlp:
    """What stands between the two products is rounded in one operation."""

    gate_up: QuantizedWeight
    down: QuantizedWeight

    def __call__(self, x: torch.Tensor, norm: RMSNorm, *, is_prompt: bool = False) -> torch.Tensor:
        if is_prompt:
            normed, ordered = norm.of_prompt(x)
            return quantized_mlp(normed, self.gate_up, self.down, x.dtype, residual=x, ordered=ordered)
        inner = quantized_linear(_rounded(x, norm), [self.gate_up], torch.float32)
        return quantized_linear(quantize_silu_mul(inner), [self.down], x.dtype, residual=x)


@dataclass(frozen=True, slots=True)
class QuantizedMoe:
    """router [experts + 1, hidden], not rounded: the last row is the gate of the shared expert."""

    router: Linear
    experts: QuantizedExperts
    num_chosen: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, *, is_prompt: bool = False) -> torch.Tensor:
        if is_prompt:
            return self._of_prompt(x, *norm.of_prompt(x))
        rows, logits = router_logits(x, norm.weight, norm.eps, self.router.weight)
        return quantized_experts(rows, logits, self.experts, self.num_chosen, x.dtype, residual=x)

    def _of_prompt(self, x: torch.Tensor, normed: torch.Tensor, ordered: torch.Tensor) -> torch.Tensor:
        chosen, weights = expert_choice(row_matmul(normed, self.router.weight), self.num_chosen)
        return quantized_grouped_experts(normed, chosen, weights, self.experts, x.dtype, x, ordered)


def _rounded(x: torch.Tensor | QuantizedRows, norm: RMSNorm | None) -> QuantizedRows:
    if isinstance(x, QuantizedRows):
        return x
    return quantize_rms_norm(x, norm.weight, norm.eps) if norm else quantize_rows(x)
