import ast
from pathlib import Path

import pytest
import torch

import engine.ops
from engine.ops.launch import capability_of, cdiv, has_dependent_launch, is_interpreted, next_power_of_2, plain_options

SOURCES = sorted(Path(engine.ops.__path__[0]).glob("*.py"))


def launches(source):
    """Calls of a kernel over a grid."""
    calls = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call))
    return [
        call for call in calls if isinstance(call.func, ast.Subscript) and "_kernel" in ast.unparse(call.func.value)
    ]


def says_fusion(call):
    """Itself, or through what it unfolds, unless that is written out there."""
    names = {keyword.arg for keyword in call.keywords}
    unfolded = [keyword.value for keyword in call.keywords if keyword.arg is None]
    return "enable_fp_fusion" in names or any(not isinstance(value, ast.Dict | ast.IfExp) for value in unfolded)


def test_every_launch_says_whether_products_and_sums_are_fused():
    """Triton 3.10 does otherwise than 3.9 where it is not told: other bits, and until then a warning."""
    found = [call for source in SOURCES for call in launches(source)]
    assert len(found) > 40
    assert not [ast.unparse(call.func) for call in found if not says_fusion(call)]


@pytest.mark.parametrize("a, b, quotient", [(0, 64, 0), (1, 64, 1), (64, 64, 1), (65, 64, 2)])
def test_cdiv(a, b, quotient):
    assert cdiv(a, b) == quotient


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


@pytest.mark.kernels
@pytest.mark.skipif(not is_interpreted(), reason="asks for a card otherwise")
def test_the_interpreter_is_no_card():
    cpu = torch.device("cpu")
    assert capability_of(cpu) == (0, 0) and not has_dependent_launch(cpu)
    assert plain_options(4) == {}
