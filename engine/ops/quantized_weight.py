"""Matrices in 4 or 8 bits: how they are rounded and where each of their bytes lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GROUP = 64
TILE_ROWS = 16
# divisors of a group's largest magnitude that are tried as its scale; the plain one stands first
_DIVISORS = {4: (8.0, 7.2, 8.8, 10.0), 8: (127.0, 125.0, 129.0, 131.0)}
# groups rounded at a time: what is written in one pass stays in the processor's cache
_CHUNK_GROUPS = 2048


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W[n, k] = code[n, k] * scale[n, k // 64];  codes -8..7 in 4 bits or -127..127 in 8.

    words   [..., tiles, groups, bits / 2, 16, 4] int32  tiles of 16 rows, groups of 64 columns. Byte i of the 16
            bytes [t, g, p, r] belongs to row 16 t + r:
            8 bits: column 64 g + 16 p + i, as a signed byte
            4 bits: columns 64 g + 32 p + i in the low and 64 g + 32 p + 16 + i in the high nibble, each plus 8
    scales  [..., tiles, groups, 16] fp16
    rows    rows that count; those of the last tile beyond it are zero
    bits    4 or 8
    """

    words: torch.Tensor
    scales: torch.Tensor
    rows: int
    bits: int

    @property
    def columns(self) -> int:
        return self.scales.shape[-2] * GROUP

    @property
    def device(self) -> torch.device:
        return self.words.device

    def to(self, device: torch.device) -> "QuantizedWeight":
        return QuantizedWeight(self.words.to(device), self.scales.to(device), self.rows, self.bits)

    def __getitem__(self, index: int) -> "QuantizedWeight":
        """One of a stack of matrices."""
        return QuantizedWeight(self.words[index], self.scales[index], self.rows, self.bits)


def quantize_weight(weight: torch.Tensor, bits: int) -> tuple[QuantizedWeight, torch.Tensor]:
    """Rounds each group with the scale, of those tried, that leaves the smallest squared error.

    weight  [..., rows, columns]  columns a multiple of 64
    return  the matrix, and a [2, 2] fp64 table of sums of squares: row 0 of the error and of the weight,
            row 1 of the error that a scale of max-abs over the largest code would have left, and of the weight
    raises  ValueError when a weight is not finite or no fp16 scale reaches it
    """
    *stack, rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns are no multiple of {GROUP}")
    tiles, groups = -(-rows // TILE_ROWS), columns // GROUP
    codes = torch.zeros(*stack, tiles * TILE_ROWS, groups, GROUP, dtype=torch.int8, device=weight.device)
    scales = torch.zeros(*stack, tiles * TILE_ROWS, groups, dtype=torch.float16, device=weight.device)
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for index in range(weight[..., 0, 0].numel()):
        matrix = weight.reshape(-1, rows, columns)[index]
        target = codes.view(-1, tiles * TILE_ROWS, groups, GROUP)[index, :rows].view(-1, GROUP)
        squares += _round_groups(
            matrix, bits, target, scales.view(-1, tiles * TILE_ROWS, groups)[index, :rows].view(-1)
        )
    return QuantizedWeight(pack(codes, bits), _tile_scales(scales), rows, bits), squares


def dequantize_weight(weight: QuantizedWeight) -> torch.Tensor:
    """return  [..., rows, columns] fp32"""
    codes, scales = unpack(weight)
    return (codes.float() * scales.float().unsqueeze(-1)).flatten(-2)


def stack_rows(weights: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """The matrices one above the other: those beside each other become one where bits and whole tiles allow it."""
    stacked = [weights[0]]
    for weight in weights[1:]:
        last = stacked[-1]
        if last.bits == weight.bits and last.rows % TILE_ROWS == 0:
            pairs = (last.words, weight.words), (last.scales, weight.scales)
            words, scales = (torch.cat(pair) for pair in pairs)
            stacked[-1] = QuantizedWeight(words, scales, last.rows + weight.rows, weight.bits)
        else:
            stacked.append(weight)
    return stacked


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [..., tiles * 16, groups, 64] int8  ->  words"""
    *stack, rows, groups, _ = codes.shape
    tiled = codes.view(*stack, rows // TILE_ROWS, TILE_ROWS, groups, 4, 16).movedim(-4, -2)
    if bits == 4:
        low, high = ((tiled[..., first::2, :, :] + 8).to(torch.uint8) for first in (0, 1))
        tiled = low | (high << 4)
    return tiled.contiguous().view(torch.int32)


def unpack(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """return  codes [..., rows, groups, 64] int8 and scales [..., rows, groups] fp16"""
    tiled = weight.words.view(torch.uint8 if weight.bits == 4 else torch.int8)
    if weight.bits == 4:
        nibbles = torch.stack([tiled & 15, tiled >> 4], dim=-3).to(torch.int8) - 8
        tiled = nibbles.flatten(-4, -3)
    codes = tiled.movedim(-2, -4).flatten(-5, -4).flatten(-2)
    scales = weight.scales.movedim(-1, -2).flatten(-3, -2)
    return codes[..., : weight.rows, :, :], scales[..., : weight.rows, :]


def _tile_scales(scales: torch.Tensor) -> torch.Tensor:
    """[..., tiles * 16, groups]  ->  [..., tiles, groups, 16]"""
    return scales.unflatten(-2, (-1, TILE_ROWS)).movedim(-2, -1).contiguous()


def _round_groups(matrix: torch.Tensor, bits: int, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Fills codes [n, 64] and scales [n] from matrix of n * 64 numbers; returns the table of squares."""
    squares = torch.zeros(2, 2, dtype=torch.float64)
    flat = matrix.reshape(-1, GROUP).contiguous()
    for start in range(0, len(flat), _CHUNK_GROUPS):
        part = slice(start, start + _CHUNK_GROUPS)
        wide = flat[part].float()
        plain = _plain_error(wide, bits)
        code, scale, error = _best(wide, bits)
        codes[part], scales[part] = code, scale
        weight = wide.square().sum(dtype=torch.float64)
        squares += torch.stack([error.sum(dtype=torch.float64), weight, plain, weight]).view(2, 2).cpu()
    return squares


def _best(wide: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes as numbers, fp16 scales and squared errors of groups [n, 64]."""
    least, most = wide.aminmax(dim=1, keepdim=True)
    extreme = torch.where(most > -least, most, least)
    # the code range reaches one further below zero: the extreme goes there, so the scale has the other sign
    extreme = -extreme if bits == 4 else extreme.abs()
    scale, gain = _least_squares(wide, extreme / _DIVISORS[bits][0], bits)
    for divisor in _DIVISORS[bits][1:]:
        other_scale, other_gain = _least_squares(wide, extreme / divisor, bits)
        scale, gain = torch.where(other_gain > gain, other_scale, scale), torch.maximum(gain, other_gain)
    plain = _rounded(wide, extreme.abs() / (7 if bits == 4 else 127), bits)
    code, half, error = _better(plain, _rounded(wide, scale, bits))
    return code, half.squeeze(1), error


def _least_squares(wide: torch.Tensor, scale: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scale for the codes that a first scale gives, and by how much it lessens the squared error."""
    code = _codes(wide, scale, bits)
    fit = torch.linalg.vecdot(wide, code).unsqueeze(1)
    best = fit / torch.linalg.vecdot(code, code).unsqueeze(1).clamp_(min=1)
    return best, best * fit


def _codes(wide: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (wide * inverse).round_().clamp_(-8 if bits == 4 else -127, 7 if bits == 4 else 127)


def _rounded(wide: torch.Tensor, scale: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest codes under scale [n, 1], which is first rounded to fp16."""
    half = scale.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError("a weight is not finite, or too large for an fp16 scale")
    scale = half.float()
    code = _codes(wide, scale, bits)
    error = torch.addcmul(wide, code, scale, value=-1).square_().sum(1)
    return code, half, error


def _better(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    wins = two[-1] < one[-1]
    return tuple(torch.where(wins.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(one, two, strict=True))


def _plain_error(wide: torch.Tensor, bits: int) -> torch.Tensor:
    largest = wide.abs().amax(1, keepdim=True)
    return _rounded(wide, largest / (7 if bits == 4 else 127), bits)[-1].sum(dtype=torch.float64)
