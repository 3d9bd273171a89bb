"""The house rules as tests: imports go one way, the world stays at the edge, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from diloco_cli.environment import environment_with

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "diloco_cli"
LAYERS: list[set[str]] = [
    {"errors", "clock", "environment", "randomness", "paths", "quantities", "digests", "layout", "plots"}
    | {"signing", "formulas", "methods"},
    {"store"},
    {"config"},
    {"tensors", "protocol", "faults"},
    {"events", "corpus"},
    {"runtime", "virtual", "plan", "tasks"},
    {"training", "launch", "chaos", "forecast", "engines"},
    {"learner", "syncer"},
    {"loop"},
    {"integrations"},
    {"observe"},
    {"probe", "doctor", "report", "metrics", "export", "inference"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
ROOMS = ["log", "rules", "actors", "regions"]  # of protocol/: each knows those before it
OF_THE_STORE = "diloco_cli.store.port"  # is all that protocol code knows: an interface and its answers
MAX_LINES = 800
MAX_FUNCTION_LINES = 60
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every imported module's full name and line, function-level imports included."""
    found: list[tuple[str, int]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.module, node.lineno))
    return found


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_imports_go_one_way() -> None:
    wrong = [f"{path.relative_to(ROOT)}:{line}: {module}" for path in MODULES for module, line in wrong_imports(path)]
    assert not wrong


def wrong_imports(path: Path) -> Iterator[tuple[str, int]]:
    importer = part_of(path)
    if importer in ("__init__", "__main__"):
        return
    for module, line in imports_of(path):
        if not module.startswith("diloco_cli."):
            continue
        imported = module.split(".")[1]
        if imported == importer == "protocol":
            if room_of(module) > ROOMS.index(path.relative_to(PACKAGE).with_suffix("").parts[1]):
                yield module, line
        elif imported != importer:
            allowed = RANK[imported] < RANK[importer] or RANK[imported] == RANK[importer] == 0
            if not allowed or (importer == "protocol" and imported == "store" and module != OF_THE_STORE):
                yield module, line


def room_of(module: str) -> int:
    """Of a module of protocol/, or of a room itself."""
    return ROOMS.index(module.split(".")[2])


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("protocol", {"torch", "time", "random", "os", "socket", "threading", "numpy", "fsspec", "pathlib"}),
        ("plan", {"torch", "time", "random", "os", "socket", "threading", "numpy", "fsspec"}),
        ("config", {"torch", "time", "random", "socket", "threading", "numpy", "fsspec"}),
        ("tensors", {"time", "random", "os", "socket", "threading", "fsspec", "pathlib"}),
    ],
)
def test_the_centre_knows_no_world(part: str, forbidden: set[str]) -> None:
    for path in sorted((PACKAGE / part).rglob("*.py")):
        for module, line in imports_of(path):
            assert module.split(".")[0] not in forbidden, f"{path.name}:{line}: {part}/ must not import {module}"
            if part == "protocol":
                assert not module.startswith(("diloco_cli.clock", "diloco_cli.randomness", "diloco_cli.environment"))


@pytest.mark.parametrize(
    ("module", "owner"),
    [("time", "clock.py"), ("random", "none"), ("secrets", "randomness.py"), ("pickle", "none"), ("shelve", "none")],
)
def test_time_and_randomness_have_one_home(module: str, owner: str) -> None:
    users = {path.name for path in MODULES for name, _ in imports_of(path) if name.split(".")[0] == module}
    assert users <= {owner}


def test_nobody_calls_what_is_dangerous() -> None:
    """No eval, exec, torch.load, os.environ outside its module, shell=True, bare except."""
    for path in MODULES:
        where = path.relative_to(ROOT)
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{where}:{node.lineno}: bare except"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                assert name not in ("torch.load", "torch.save", "os.system"), f"{where}:{node.lineno}: {name}"
                assert name != "os.environ" or path.name == "environment.py", f"{where}:{node.lineno}: {name}"
            if isinstance(node, ast.Call):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert called not in ("eval", "exec", "compile"), f"{where}:{node.lineno}: {called}()"
                shell = [k for k in node.keywords if k.arg == "shell"]
                assert not shell, f"{where}:{node.lineno}: shell="


def test_files_and_functions_stay_small() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


def test_no_vague_names() -> None:
    vague = {"utils", "helpers", "common", "core", "manager", "misc"}
    assert not [path for path in PACKAGE.rglob("*") if path.stem in vague]


def test_a_class_name_occurs_once() -> None:
    found = [
        (node.name, str(path.relative_to(ROOT)))
        for folder in ("diloco_cli", "tests", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    ]
    count = Counter(name for name, _ in found)
    assert not [(name, where) for name, where in found if count[name] > 1]


def test_top_level_is_what_the_readme_shows() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in listed}
    visible = {name for name in top if not name.startswith(".")}
    assert visible <= {
        "pyproject.toml", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE",
        "diloco_cli", "templates", "tests", "examples",
    }  # fmt: skip


HEAVY = {"torch", "gcsfs", "fsspec", "aiohttp", "numpy", "safetensors"}


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        ("--help", HEAVY),
        ("plan templates/inventory.yaml --fast", HEAVY | {"rich", "diloco_cli.forecast.fleet"}),
        ("plan templates/inventory.yaml", (HEAVY | {"rich"}) - {"numpy"}),
        ("plan -f examples/quickstart/run.yaml", HEAVY | {"rich"}),
        ("plan -f examples/own-data/run.yaml", HEAVY | {"rich"}),
        ("data show nowhere", {"torch", "gcsfs"}),
        ("status nowhere", HEAVY | {"yaml", "prometheus_client", "matplotlib", "diloco_cli.plan.plan"}),
        ("chaos list", HEAVY),
        ("runs", HEAVY),
        ("inventory probe --help", HEAVY),
        ("doctor .", HEAVY),
        ("simulate goodput --chips 300k --learners 4 --days 0.5", HEAVY - {"numpy"}),
        ("simulate bandwidth", HEAVY - {"numpy"}),
        ("simulate run examples/quickstart/run.yaml --for 2s", HEAVY - {"numpy"}),
    ],
)
def test_light_commands_import_no_torch_and_no_cloud_client(words: str, forbidden: set[str], tmp_path: Path) -> None:
    loaded = loaded_by([str(ROOT / word) if word.endswith(".yaml") else word for word in words.split()], tmp_path)
    assert loaded and not loaded & forbidden, loaded & forbidden


def test_what_would_be_submitted_is_told_without_torch(tmp_path: Path) -> None:
    """Up to where Slurm is asked, which may be missing."""
    (tmp_path / "run.yaml").write_text((ROOT / "examples" / "quickstart" / "run.yaml").read_text())
    islands = "islands: [{name: iowa, region: us, infra: slurm/us, accelerators: cpu:1}]"
    (tmp_path / "inventory.yaml").write_text(f"version: 1\nstore: {{url: bucket}}\n{islands}\n")
    loaded = loaded_by(["launch", "-n"], tmp_path)
    assert "diloco_cli.engines.slurm" in loaded and not loaded & HEAVY, loaded & HEAVY


def loaded_by(words: list[str], folder: Path) -> set[str]:
    """The modules that this command of diloco imports."""
    code = (
        "import sys; sys.argv[0] = 'diloco'\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sys.modules, file=sys.stderr)"
    )
    environment = environment_with(DILOCO_HOME=str(folder / "home"))  # or `runs` asks for what other tests noted
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return set(done.stderr.partition("loaded: ")[2].split())


def test_no_modules_know_each_other() -> None:
    """Also by way of others, by imports within functions, and for types alone."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    knows = {name: set(_imported_modules(path)) & names.keys() - {name} for name, path in names.items()}
    reached = {name: _reached(name, knows) for name in names}
    assert not [name for name in names if name in reached[name]]


def _imported_modules(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached(name: str, knows: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        new = knows[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached
