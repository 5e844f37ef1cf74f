"""The kernels between two passes compile for every card."""

import pytest

from engine.ops.accept_drafts import accept_drafts_kernel
from engine.ops.decode_rows import COPIED, decode_rows_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler"),
    pytest.mark.parametrize("capability", SHARED_MEMORY),
]
WIDE = {
    *("numbers_ptr", "slots_ptr", "token_ids_ptr", "positions_ptr", "next_positions_ptr", "mapping_ptr", "chosen_ptr"),
    *("standing_ptr", "last_rows_ptr", "places_ptr", "record_ptr"),
}


# tables of one block are launched with a width that is a constant
WIDTHS = pytest.mark.parametrize("width", [None, 1])


def types(kernel, width):
    pointers = {name: "*i64" if name in WIDE else "*i32" for name in kernel.arg_names if name.endswith("_ptr")}
    return pointers | {"stride": "i32"} | ({"width": "i32"} if width is None else {})


def constant(width):
    return {} if width is None else {"width": width}


@WIDTHS
def test_decode_rows(capability, width):
    constants = {"ROWS": 4, "PADDED": 4, "COPIED": COPIED} | constant(width)
    compiled(decode_rows_kernel, capability, types(decode_rows_kernel, width), constants, 4)


@WIDTHS
def test_accept_drafts(capability, width):
    constants = {"ROWS": 4, "DEPTH": 3, "COMMITS": False, "PADDED_ROWS": 4, "PADDED_DEPTH": 4}
    constants |= {"PDL": capability >= 90} | constant(width)
    compiled(accept_drafts_kernel, capability, types(accept_drafts_kernel, width), constants, 4)
