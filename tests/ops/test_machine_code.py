"""What is read from machine code; `compiled` looks at every kernel this way."""

import pytest

from tests.ops.machine_code import overwritten

# a loop as ptxas 12.8 left it, shortened
LOOP = """
.L_x_1:
        /*11c0*/                   DEPBAR.LE SB0, 0x3 ;
        /*11d0*/                   {first} ;
        /*1200*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*3270*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3275*/                   {second} ;
        /*3280*/                   WARPGROUP.ARRIVE ;
        /*33c0*/                   HGMMA.64x64x16.F32.BF16 R56, R152, gdesc[UR16], R56 ;
        /*33f0*/                   HGMMA.64x64x16.F32.BF16 R24, R172, gdesc[UR4], R24, gsb0 ;
        /*3480*/                   LDGSTS.E.BYPASS.128 [R193+0x4000], desc[UR16][R152.64], !P1 ;
        /*3550*/               @P2 BRA `(.L_x_1) ;
        /*3560*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*3570*/                   FADD R56, R56, R24 ;
        /*3580*/                   EXIT ;
"""
NOTHING = "UIADD3 UR9, UR9, 0x1, URZ"


def test_a_register_is_kept_until_the_wait():
    assert not overwritten(LOOP.format(first=NOTHING, second="IMAD.MOV.U32 R152, RZ, RZ, R16"))


@pytest.mark.parametrize(
    "write",
    [
        "IMAD.MOV.U32 R152, RZ, RZ, R16",
        "LDS.64 R154, [R22+0xa000]",
        "LDSM.16.M88.4 R149, [R22]",
        "@!P0 IADD3 R175, P1, R16, 0x20, RZ",
        "HMMA.16816.F32.BF16 R22, R4, R6, R20",
        "SHFL.BFLY PT, R60, R61, 0x10, 0x1f",
    ],
)
def test_one_that_is_written_earlier_is_found(write):
    found = overwritten(LOOP.format(first=write, second=NOTHING))
    assert found and all(line.endswith(write) for line in found)


@pytest.mark.parametrize("other", ["LDS.64 R156, [R152]", "STS [R152], R153", "ISETP.GT.AND P0, PT, R152, R24, PT"])
def test_reading_is_no_writing(other):
    assert not overwritten(LOOP.format(first=other, second=NOTHING))
