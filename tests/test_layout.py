"""The import arrows of the project, kept as a test because Python has no linker."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# kernels, whose lists of arguments are long, apart from everything that decides and runs
LINES = {"engine/ops/": 9_000, "engine/": 11_000}

# part -> the parts of this repository that it may import; the longest match owns a file
ARROWS = {
    "config": set(),
    "engine/ops": set(),
    "engine/layers": {"engine/ops"},
    "engine/models": {
        "engine/layers",
        "engine/ops",
        "engine/models/config",
        "engine/errors",
        "engine/batch",
        "config",
    },
    "engine/cache": {
        "engine/ops",
        "engine/request",
        "engine/errors",
        "engine/batch",
        "engine/models/config",
        "config",
    },
    "engine/models/config": {"engine/errors"},
    "engine/errors": set(),
    "engine/request": set(),
    "engine/batch": {"config"},
    "engine/chunk_budget": {"config"},
    "engine/prompt_order": set(),
    "engine/schedule": {"engine/request", "engine/cache", "config"},
    "engine/reuse": {"engine/schedule", "engine/cache", "config"},
    "engine/scheduler": {
        "engine/schedule",
        "engine/reuse",
        "engine/request",
        "engine/errors",
        "engine/cache",
        "engine/chunk_budget",
        "engine/prompt_order",
        "config",
    },
    "engine/planner": {
        "engine/errors",
        "engine/cache",
        "engine/convert",
        "engine/models",
        "engine/models/config",
        "config",
    },
    "engine/capacity": {"engine/errors", "engine/planner", "config"},
    "engine/messages": {"engine/request"},
    "engine/convert": {"engine/ops", "engine/models", "engine/models/config", "engine/errors", "config"},
    "engine/embedded": {"engine/ops", "engine/cache", "engine/models", "engine/convert", "engine/batch", "config"},
    "engine": {
        "engine/ops",
        "engine/layers",
        "engine/models",
        "engine/models/config",
        "engine/cache",
        "engine/schedule",
        "engine/reuse",
        "engine/scheduler",
        "engine/chunk_budget",
        "engine/prompt_order",
        "engine/planner",
        "engine/capacity",
        "engine/messages",
        "engine/request",
        "engine/errors",
        "engine/batch",
        "config",
    },
    "server": {"engine", "config"},
    "router": {"config"},
}
NO_TORCH = [
    "engine/__init__",
    "engine/client",
    "engine/request",
    "engine/errors",
    "engine/messages",
    "engine/checkpoint_dir",
    "engine/constraint",
    "engine/validation",
    "engine/token_stream",
    "engine/child",
    "engine/process",
    "engine/schedule",
    "engine/reuse",
    "engine/scheduler",
    "engine/chunk_budget",
    "engine/prompt_order",
    "engine/planner",
    "engine/plan",
    "engine/capacity",
    "engine/cache/block_pool",
    "engine/cache/prefix_cache",
    "engine/models/config",
    "server",
    "router",
    "config",
]


def is_in(path: str, part: str) -> bool:
    return path == part or path.startswith(part + "/")


def owner(path: str) -> str | None:
    return max((part for part in ARROWS if is_in(path, part)), key=len, default=None)


def python_files():
    for top in ("config", "engine", "server", "router"):
        for file in sorted((ROOT / top).rglob("*.py")):
            yield file, file.relative_to(ROOT).with_suffix("").as_posix()


def imports(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} relative import"
            yield node.lineno, node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


def test_arrows():
    for file, path in python_files():
        part = owner(path)
        for line, module in imports(file):
            target = owner(module.replace(".", "/"))
            assert target in {None, part, *ARROWS[part]}, f"{file}:{line} {part} -> {module}"
            if part in {"server", "router"} and target and target.startswith("engine"):
                assert module == "engine", f"{file}:{line} imports past the engine's face"


@pytest.mark.parametrize("part", ARROWS)
def test_every_part_exists(part):
    assert any(is_in(path, part) for _, path in python_files())


@pytest.mark.parametrize("path", NO_TORCH)
def test_deciding_code_has_no_torch(path):
    files = [file for file, name in python_files() if is_in(name, path)]
    assert files, f"nothing is called {path}"
    for file in files:
        heads = {module.split(".")[0] for _, module in imports(file)}
        assert not {"torch", "triton"} & heads, file


def test_files_have_no_import_cycle():
    names = {path.replace("/", ".").removesuffix(".__init__"): file for file, path in python_files()}
    graph = {name: {module for _, module in imports(file) if module in names} for name, file in names.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name] - {name}):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_engine_stays_small():
    lines = dict.fromkeys(LINES, 0)
    for file, path in python_files():
        owner = next((part for part in LINES if path.startswith(part)), None)
        if owner and not path.startswith("engine/embedded/"):
            lines[owner] += len(file.read_text().splitlines())
    assert all(lines[part] <= most for part, most in LINES.items()), lines
