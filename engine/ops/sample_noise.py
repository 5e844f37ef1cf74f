"""Gumbel noise that depends on seed, position and token id alone."""

import torch
import triton
import triton.language as tl

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit numbers that differ in an unrelated way for each seed and position."""
    return _halves(_mix64(_mix64(seed & _MASK64) + position))


def seed_key(seed: int) -> int:
    """The seed's part of a key, as a signed 64-bit number."""
    key = _mix64(seed & _MASK64)
    return key - 2**64 if key >= 2**63 else key


def noise_keys_of(seed_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[rows] and [rows], as from seed_key, to [rows, 2] as from noise_key."""
    pairs = zip(seed_keys.tolist(), positions.tolist(), strict=True)
    keys = [_halves(_mix64((seed & _MASK64) + position)) for seed, position in pairs]
    return torch.tensor(keys, dtype=torch.int32, device=seed_keys.device)


def _halves(key: int) -> tuple[int, int]:
    return (key & _MASK32) - 2**31, (key >> 32) - 2**31


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)), u uniform in (0, 1) and a function of key and token id.

    keys       [..., 2] int32, as from noise_key
    token_ids  int32, of a shape that broadcasts with keys[..., 0]
    return     fp32
    """
    bits = _mix32(_mix32(token_ids ^ keys[..., 0]) + keys[..., 1]) & 0x7FFFFFFF
    # 1 - u rather than u: the tail that decides lies where fp32 is finest
    rest = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return rest.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """An invertible hash in wrapping int32 arithmetic, the same on every device."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def _mix64(x: int) -> int:
    """An invertible hash of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


@triton.jit
def gumbel_noise(seed_key, position, token_ids):
    """The same for a vector of ids; the logarithms round as the device's do.

    seed_key   int64
    position   int64
    token_ids  int32
    """
    key = mix64(seed_key.to(tl.int64) + position.to(tl.int64))
    low = key.to(tl.int32) ^ -2147483648
    high = (key >> 32).to(tl.int32) ^ -2147483648
    bits = mix32(mix32(token_ids ^ low) + high) & 0x7FFFFFFF
    rest = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.999999940395355)
    # log1p(-rest): the rounding of 1 - rest is taken back by the quotient
    left = 1.0 - rest
    whole = left == 1.0
    logarithm = tl.log(left) * tl.div_rn(rest, tl.where(whole, 1.0, 1.0 - left))
    return -tl.log(tl.where(whole, rest, -logarithm))


@triton.jit
def mix32(x):
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def mix64(x):
    """int64; the constants are those of the host's, read as signed numbers"""
    x = x + -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
