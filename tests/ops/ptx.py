"""Runs blocks of a compiled kernel on numpy, one register of all threads at a time, where no GPU is at hand.

For straight lines and loops that all threads of a block take together, which is what the products compile to. Warps are
never apart, so a missing barrier goes unseen.
"""

import operator
import re

import numpy as np

COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
FLOATS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
ADDRESS = re.compile(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+))?\s*\]")


class Block:
    """Registers hold int64 [threads] with the bits of their values, predicates bool [threads].

    memory  uint8, where pointers among the parameters count from its start
    """

    def __init__(self, ptx: str, memory: np.ndarray, parameters: list[int], threads: int, place: tuple[int, int]):
        self.lines, self.labels = lines_of(ptx)
        self.spaces = {"global": memory, "shared": np.zeros(1 << 16, np.uint8)}
        self.parameters = parameters
        self.threads = threads
        zero = np.zeros(threads, np.int64)
        self.registers = {
            "%tid.x": np.arange(threads), "%ctaid.x": zero + place[0], "%ctaid.y": zero + place[1], "global_smem": zero
        }  # fmt: skip

    def run(self) -> None:
        at = 0
        while not self.lines[at].startswith("ret"):
            guard, operation, operands = parts_of(self.lines[at])
            taken = self._taken(guard)
            at += 1
            if operation.startswith("bra"):
                assert taken.all() or not taken.any(), "threads part"
                at = self.labels[operands[0]] if taken.all() else at
            elif not operation.startswith("bar"):
                self._step(operation, operands, taken)

    def _taken(self, guard: str) -> np.ndarray:
        if not guard:
            return np.ones(self.threads, bool)
        values = self.registers[guard.lstrip("@!")]
        return ~values if "!" in guard else values

    def _step(self, operation: str, operands: list[str], taken: np.ndarray) -> None:
        name, *kinds = operation.split(".")
        target, *sources = operands
        if name in ("ld", "st"):
            self._move_memory(name, kinds, operands, taken)
        elif name == "ldmatrix":
            assert "trans" not in kinds
            self._load_matrices(registers_of(target), self._addresses(sources[0]))
        elif name == "mma":
            self._multiply_matrices(*(registers_of(operand) for operand in operands))
        elif name == "mov" and "{" in target + sources[0]:
            self._repack(target, sources[0], bits_of(kinds[-1]))
        else:
            self._write(target, self._compute(name, kinds, [self.read(source) for source in sources]), kinds)

    def read(self, operand: str) -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(self.threads, number, np.int64)

    def _write(self, target: str, value: np.ndarray, kinds: list[str]) -> None:
        bits = 64 if "wide" in kinds else bits_of(kinds[0] if len(kinds) > 1 and kinds[0] != "lo" else kinds[-1])
        if kinds[0] == "rn":
            bits = 32
        self.registers[target] = value if value.dtype == bool or bits == 64 else value & ((1 << bits) - 1)

    def _compute(self, name: str, kinds: list[str], values: list[np.ndarray]) -> np.ndarray:
        kind = kinds[-1]
        if kind == "f32" and name in (*FLOATS, "fma"):
            return bits_of_floats(self._compute_floats(name, [floats(value) for value in values]))
        if name == "cvt":
            return converted(kind, kinds[-2], values[0])
        signed = [signed_of(value, bits_of(kind)) if kind.startswith("s") else value for value in values]
        if name == "setp":
            return COMPARISONS[kinds[0]](*signed)
        if name in LOGIC:
            return LOGIC[name](*values)
        return {
            "mov": lambda: values[0] if kind != "pred" else values[0].astype(bool),
            "add": lambda: values[0] + values[1],
            "sub": lambda: values[0] - values[1],
            "mul": lambda: signed[0] * signed[1],
            "mad": lambda: signed[0] * signed[1] + values[2],
            "shl": lambda: values[0] << values[1],
            "shr": lambda: signed[0] >> values[1],
            "bfe": lambda: (values[0] >> values[1]) & ((1 << values[2]) - 1),
            "selp": lambda: np.where(values[2], values[0], values[1]),
        }[name]()

    def _compute_floats(self, name: str, values: list[np.ndarray]) -> np.ndarray:
        if name == "fma":
            a, b, c = (value.astype(np.float64) for value in values)
            return (a * b + c).astype(np.float32)
        return FLOATS[name](*values)

    def _addresses(self, operand: str) -> np.ndarray:
        base, offset = ADDRESS.match(operand).groups()
        return self.read(base) + int(offset or 0)

    def _move_memory(self, name: str, kinds: list[str], operands: list[str], taken: np.ndarray) -> None:
        if kinds[0] == "param":
            self.registers[operands[0]] = np.full(self.threads, self.parameters[number_of(operands[1])], np.int64)
            return
        memory, size = self.spaces[kinds[0]], bits_of(kinds[-1]) // 8
        registers, address = operands if name == "ld" else reversed(operands)
        at = self._addresses(address)[taken]
        for i, register in enumerate(registers_of(registers)):
            places = at[:, None] + i * size + np.arange(size)
            assert (places >= 0).all() and (places < len(memory)).all(), "out of bounds"
            if name == "ld":
                value = self.registers.get(register, np.zeros(self.threads, np.int64)).copy()
                value[taken] = (memory[places].astype(np.int64) << (8 * np.arange(size))).sum(1)
                self.registers[register] = value
            else:
                memory[places] = (self.read(register)[taken, None] >> (8 * np.arange(size))) & 255

    def _load_matrices(self, targets: list[str], rows: np.ndarray) -> None:
        """Row r of matrix m begins where thread 8 m + r of the warp says; a thread gets a quarter of a row of each."""
        lane = np.arange(32)
        for m, target in enumerate(targets):
            at = rows.reshape(-1, 32)[:, 8 * m + lane // 4].ravel() + 4 * (np.arange(self.threads) % 4)
            words = self.spaces["shared"][at[:, None] + np.arange(4)].astype(np.int64)
            self.registers[target] = (words << (8 * np.arange(4))).sum(1)

    def _multiply_matrices(self, targets: list[str], a: list[str], b: list[str], c: list[str]) -> None:
        """m16n8k32 of signed bytes."""
        group, place = np.arange(32) // 4, np.arange(32) % 4
        left, right = (np.zeros((self.threads // 32, *shape), np.int64) for shape in ((16, 32), (32, 8)))
        for i in range(4):
            column = 4 * place + i
            for q in range(4):
                left[:, group + 8 * (q % 2), column + 16 * (q // 2)] = self._byte(a[q], i)
            for q in range(2):
                right[:, column + 16 * q, group] = self._byte(b[q], i)
        product = left @ right
        sums = [signed_of(self.read(register), 32) for register in c]
        for q, target in enumerate(targets):
            value = product[:, group + 8 * (q // 2), 2 * place + q % 2].ravel()
            self.registers[target] = (sums[q] + value) & 0xFFFFFFFF

    def _byte(self, register: str, i: int) -> np.ndarray:
        return signed_of((self.read(register).reshape(-1, 32) >> (8 * i)) & 255, 8)

    def _repack(self, target: str, source: str, bits: int) -> None:
        if "{" in target:
            targets, value = registers_of(target), self.read(source)
            size = bits // len(targets)
            for i, register in enumerate(targets):
                self.registers[register] = (value >> (i * size)) & ((1 << size) - 1)
        else:
            parts = [self.read(register) for register in registers_of(source)]
            self.registers[target] = sum(part << (i * bits // len(parts)) for i, part in enumerate(parts))


def lines_of(ptx: str) -> tuple[list[str], dict[str, int]]:
    """The instructions of the kernel, and before which of them each label stands."""
    lines, labels = [], {}
    for line in ptx[ptx.index("{\n", ptx.index(".entry")) :].splitlines():
        line = line.split("//")[0].strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        elif line.endswith(";") and not line.startswith("."):
            lines.append(line[:-1])
    return lines, labels


def parts_of(line: str) -> tuple[str, str, list[str]]:
    guard, _, line = line.partition(" ") if line.startswith("@") else ("", "", line)
    operation, operands = line.strip().split(None, 1)
    return guard, operation, [operand.strip() for operand in re.split(r",(?![^{\[]*[}\]])", operands)]


def registers_of(operand: str) -> list[str]:
    return [register.strip() for register in operand.strip("{} ").split(",")]


def number_of(parameter: str) -> int:
    return int(re.search(r"(\d+)\]", parameter).group(1))


def bits_of(kind: str) -> int:
    digits = re.search(r"\d+$", kind)
    return int(digits.group()) if digits else 64


def signed_of(value: np.ndarray, bits: int) -> np.ndarray:
    if bits == 64:
        return value
    half = 1 << (bits - 1)
    return ((value & (2 * half - 1)) ^ half) - half


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def bits_of_floats(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32).astype(np.int64)


def converted(source: str, target: str, value: np.ndarray) -> np.ndarray:
    if source == "f16":
        return bits_of_floats(value.astype(np.uint16).view(np.float16))
    if source.startswith("s"):
        value = signed_of(value, bits_of(source))
    return bits_of_floats(value) if target == "f32" else value
