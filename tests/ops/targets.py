"""Compiles a kernel for a card that is not there."""

import warnings

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource

from tests.ops.machine_code import overwritten_operands

# compute capability -> shared memory that one block may have, bytes
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


def compiled(kernel, capability, types, constants, num_warps, sixteens=(), **options):
    """types     name -> Triton's type of the argument; pointers count as aligned to 16 bytes, as allocations are
    sixteens  names of integers that are multiples of 16, for which a launch compiles other code
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in sixteens
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    with warnings.catch_warnings():
        # a notice about a default of the next version of Triton
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        made = compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps, "enable_fp_fusion": False, **options},
        )
    if capability == 90:
        assert not (found := overwritten_operands(made.asm["cubin"])), found
    return made
