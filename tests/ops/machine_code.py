"""Reads in a kernel's machine code what no interpreter shows: whether operands stay until their product has ended.

On compute capability 9.0 a matrix instruction of a warp group reads its left side from registers, and its sums from and
into registers, until the group has been waited for. ptxas keeps them within a straight piece of code. Where the wait of
a loop's last product stands in the next iteration, the ptxas of Triton 3.6 (12.8) was seen to write over them before.

    python -m tests.ops.machine_code FOLDER

looks through the machine code that Triton has compiled into a folder, as `~/.triton/cache` is one.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
PRODUCT = re.compile(r"[HIQ]GMMA\.\d+x(?P<n>\d+)x\S+ R(?P<sums>\d+), (?:R(?P<left>\d+)|gdesc)")
# these write no register of a thread
WRITES_NONE = re.compile(
    r"ST|RED|BRA|BAR|LDGSTS|LDGDEPBAR|DEPBAR|WARP|EXIT|U|B?SYNC|BSSY|CALL|RET|NOP|MEMBAR|FENCE|[FIDH]SETP|PLOP|R2UR"
)


def overwritten_operands(cubin: bytes) -> list[str]:
    """A line for each matrix instruction and an instruction that may write its registers before it has ended."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return overwritten(listing)


def overwritten(listing: str) -> list[str]:
    """The same of what nvdisasm prints."""
    code, labels = _instructions(listing)
    found = []
    for place, instruction in enumerate(code):
        if product := PRODUCT.search(instruction):
            held = _registers(product["sums"], int(product["n"]) // 2) | _registers(product["left"], 4)
            found += [f"{instruction}  |  {code[at]}" for at in _writers(code, labels, place + 1, held)]
    return found


def _instructions(listing: str) -> tuple[list[str], dict[str, int]]:
    code, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L\S+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    return code, labels


def _writers(code: list[str], labels: dict[str, int], start: int, held: set[int]) -> list[int]:
    """Places on any way from `start` to a wait where one of `held` is written; products keep their own order."""
    found, seen, ways = [], set(), [start]
    while ways:
        at = ways.pop()
        if at in seen or at >= len(code) or re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0|EXIT$", code[at]):
            continue
        seen.add(at)
        if "GMMA" not in code[at] and _written(code[at]) & held:
            found.append(at)
            continue
        if target := re.search(r"BRA\S*\s+(?:\S+,\s+)?`\((\.L\S+)\)", code[at]):
            ways.append(labels[target[1]])
            if not code[at].startswith("@"):
                continue
        ways.append(at + 1)
    return found


def _written(instruction: str) -> set[int]:
    name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
    if WRITES_NONE.match(name):
        return set()
    # predicates may come first
    register = re.match(r"\s*(?:U?P[T\d]\s*,\s*)*R(\d+)\b", operands)
    if register is None:
        return set()
    return _registers(register[1], _width(name))


def _width(name: str) -> int:
    """Registers that an instruction writes, or more."""
    if re.search(r"^[HI]MMA|\.128|\.4$", name):
        return 4
    return 2 if re.search(r"\.64|\.WIDE|\.2$", name) else 1


def _registers(first: str | None, count: int) -> set[int]:
    return set() if first is None else set(range(int(first), int(first) + count))


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).rglob("*.cubin"))
    bad = {file: found for file in files if (found := overwritten_operands(file.read_bytes()))}
    for file, found in bad.items():
        print(file, *found, sep="\n    ")
    print(f"{len(files)} kernels, {len(bad)} with operands that are overwritten")
    sys.exit(bool(bad))
