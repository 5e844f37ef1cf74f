"""The encoders and decoders of the KV codecs, and the rotation before them."""

import pytest
import torch

from engine.ops.hadamard import hadamard
from engine.ops.kv_codec_e8 import e8_decode, e8_encode, nearest_e8
from engine.ops.kv_codec_int8 import int8_decode, int8_encode

CODECS = [(int8_encode, int8_decode), (e8_encode, e8_decode)]
CODEC = pytest.mark.parametrize("encode, decode", CODECS)


def relative_error(actual, exact):
    return ((actual - exact).square().sum() / exact.square().sum()).item()


def test_hadamard_by_hand():
    x = torch.zeros(2, 128)
    x[0, 0], x[1, 64 + 3] = 8.0, 8.0
    y = hadamard(x)
    assert torch.equal(y[0], torch.tensor([1.0, 0.0]).repeat_interleave(64))
    # the sign of dimension j is the parity of the bits that 3 and j share
    assert y[1, 64:72].tolist() == [1, -1, -1, 1, 1, -1, -1, 1]
    assert (y[1, :64] == 0).all()


def test_hadamard_keeps_lengths_and_undoes_itself():
    x = torch.randn(5, 3, 256, dtype=torch.float64)
    y = hadamard(x)
    assert torch.allclose(hadamard(y), x, atol=1e-14)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1))


@CODEC
def test_codes_are_their_own_codes(encode, decode):
    words, scales = encode(torch.randn(40, 2, 256))
    again, scales_again = encode(decode(words, scales, torch.float64))
    if encode is int8_encode:
        assert torch.equal(words, again) and torch.equal(scales, scales_again)
    else:
        # the largest value decides the scale, and rounding moves it: only the points' own scale returns the points
        points = decode(words, torch.ones_like(scales), torch.float64).unflatten(-1, (-1, 8))
        integers, halves = nearest_e8(points)
        assert torch.equal(integers + halves.unsqueeze(-1) / 2, points)


@CODEC
@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 5, 4, 256)])
def test_shapes(encode, decode, shape):
    x = torch.randn(shape)
    words, scales = encode(x)
    per_word = 4 if encode is int8_encode else 8
    assert words.shape == (*shape[:-1], shape[-1] // per_word) and words.dtype == torch.int32
    assert scales.shape == (*shape[:-1], shape[-1] // 64) and scales.dtype == torch.float16
    assert decode(words, scales, torch.float32).shape == shape


@CODEC
def test_zeros_and_extremes_stay_finite(encode, decode):
    x = torch.zeros(4, 64)
    x[1], x[2, 5], x[3, 0] = 1e30, -1e30, 1e-30
    y = decode(*encode(x), torch.float64)
    assert torch.isfinite(y).all() and torch.isfinite(decode(*encode(x), torch.float16)).all()
    assert (y[0] == 0).all() and (y[3] == 0).all()
    # saturated, not wrapped
    assert (y[1] > 50000).all() and y[2, 5] < -50000


def test_int8_by_hand():
    x = torch.zeros(1, 64)
    x[0, :5] = torch.tensor([127.0, -127.0, 0.5, 1.5, -3.2])
    words, scales = int8_encode(x)
    assert scales.tolist() == [[1.0]]
    # bytes 127, -127, 0 (half to even), 2 and -3
    assert words[0, :3].tolist() == [0x0200817F, 0x000000FD, 0]
    assert int8_decode(words, scales, torch.float32)[0, :6].tolist() == [127, -127, 0, 2, -3, 0]


def test_e8_by_hand():
    # max 7.5 / 0.9, so that the scale is one
    x = torch.full((1, 64), 7.5 / 0.9)
    x[0, :8] = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0])
    x[0, 8:16] = torch.tensor([0.5, 0.5, -0.5, 0.5, 0.5, 0.5, -1.5, 1.5])
    x[0, 16:24] = torch.tensor([0.9, 0, 0, 0, 0, 0, 0, 0.45])
    words, scales = e8_encode(x)
    assert scales.tolist() == [[1.0]]
    decoded = e8_decode(words, scales, torch.float32)[0]
    assert torch.equal(decoded[:16], x[0, :16])
    # 0.9 rounds to 1, an odd sum: 0.45 is the cheapest to move
    assert decoded[16:24].tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    # z + 8 = 9 9 8 8 8 8 8 8: the odd bit of the first is implied by the second, and bit 0 says integers
    assert words[0, 0].item() & 0xFFFFFFFF == 0x88888898
    # z + 8 = 8 8 7 8 8 8 6 9, and bit 0 says that 1/2 is added
    assert words[0, 1].item() & 0xFFFFFFFF == 0x96888789
    # clamped to 7.5, the largest point of the half coset with an even sum
    assert decoded[24:].unique().tolist() == [7.5]


def brute_force_distance(points):
    """Squared distance to the nearest point of the clamped lattice, over the three best values of each coordinate."""
    choices = torch.cartesian_prod(*[torch.arange(3)] * 8)
    distances = []
    for half in (0.0, 0.5):
        integers = torch.arange(-8, 8)
        costs = (points.unsqueeze(-1) - integers - half).square()
        order = costs.argsort(dim=-1)[..., :3]
        of_choice = torch.arange(8), choices
        total = costs.gather(-1, order)[:, *of_choice].sum(-1)
        is_even = integers[order][:, *of_choice].sum(-1) % 2 == 0
        distances.append(total.where(is_even, float("inf")).amin(-1))
    return torch.minimum(*distances)


def test_e8_is_the_nearest_point_under_the_clamp():
    points = torch.randn(48, 8, dtype=torch.float64) * torch.linspace(0.3, 6, 48).unsqueeze(-1)
    integers, halves = nearest_e8(points)
    assert (integers >= -8).all() and (integers <= 7).all() and (integers.sum(-1) % 2 == 0).all()
    assert halves.any() and not halves.all()
    found = (points - integers - halves.unsqueeze(-1) / 2).square().sum(-1)
    assert torch.allclose(found, brute_force_distance(points), rtol=1e-12)


def int4(groups, divisor, low, shrink=1.0):
    scale = (groups.abs().amax(-1, keepdim=True) / divisor * shrink).half().float()
    return (groups / scale).round().clamp(low, 7) * scale


def e8_without_coset(groups):
    """The lattice point rounded once more to integers, as if no bit were left for the coset."""
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    integers, halves = nearest_e8((groups / scale).unflatten(-1, (-1, 8)))
    return (integers + halves.unsqueeze(-1) / 2).round().clamp(-8, 7).flatten(-2) * scale


@pytest.mark.parametrize("law", ["normal", "student", "laplace"])
def test_relative_error_of_the_quantisers(law):
    shape = (3000, 64)
    laws = {
        "normal": lambda: torch.randn(shape),
        "student": lambda: torch.distributions.StudentT(4.0).sample(shape),
        "laplace": lambda: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    }
    x = hadamard(laws[law]())
    errors = [
        relative_error(y, x)
        for y in (e8_decode(*e8_encode(x), torch.float32), int4(x, 7, -8, 0.85), int4(x, 7, -7), e8_without_coset(x))
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.0082
    if law == "normal":
        assert errors == pytest.approx([0.0080, 0.0099, 0.0115, 0.0270], rel=0.03)


def test_rotation_tames_an_outlier_channel():
    x = torch.randn(2000, 64)
    x[:, 9] *= 12
    plain = relative_error(e8_decode(*e8_encode(x), torch.float32), x)
    rotated = relative_error(hadamard(e8_decode(*e8_encode(hadamard(x)), torch.float32)), x)
    assert plain > 5 * rotated


def test_error_of_int8():
    x = torch.randn(2000, 64)
    # a step of max / 127 where max is about 2.4 deviations: 1/12 of its square
    assert relative_error(int8_decode(*int8_encode(x), torch.float32), x) == pytest.approx(3.5e-5, rel=0.1)
