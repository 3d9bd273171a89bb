"""What no line of the product may do, read from its source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from diloco_cli.config.settings import SyncerSettings
from diloco_cli.runtime.units import learner_unit, syncer_units

PACKAGE = Path(__file__).resolve().parents[2] / "diloco_cli"
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "telnetlib",
}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.jit.load", "torch.package",
    "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "os.tempnam",
    "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput", "ssl._create_unverified_context",
}  # fmt: skip
STARTERS = {"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
KEY_FAMILIES = (
    "FORMAT.json", "plan.json", "epoch/", "incarnation/", "offer/", "delta/", "state/", "weights/", "commit/",
    "snapshot/", "inner/", "request/", "join/", "heartbeat/", "hint/",
)  # fmt: skip
OTHERS = (
    "protocol/log/keys.py",  # the one module
)


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.JoinedStr, ast.Constant, ast.keyword, ast.Attribute,
             ast.ExceptHandler)  # fmt: skip


@cache
def nodes() -> tuple[tuple[str, ast.AST], ...]:
    """(place, node) of everything that a rule here looks at."""
    return tuple(
        (f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}", node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, LOOKED_AT)
    )


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def test_no_pickle_and_nothing_that_executes_data() -> None:
    """Row 1: no pickle, torch.load, eval, exec anywhere in the exchange; safetensors or raw bytes only."""
    for where, node in nodes():
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES, where
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES, where
        if isinstance(node, ast.Call):
            assert called(node) not in FORBIDDEN_CALLS, f"{where}: {called(node)}"
            assert not any(word.arg == "allow_pickle" for word in node.keywords), where


def test_modules_are_imported_by_a_users_name_in_one_place_only() -> None:
    """Row 1: code is run by name only where the user's own run file names an entrypoint, and for our own commands
    and types."""
    users = {where.partition(":")[0] for where, node in nodes()
             if isinstance(node, ast.Call) and called(node) == "importlib.import_module"}  # fmt: skip
    assert users <= {"tasks/build.py", "cli/main.py", "cli/config.py", "store/open.py"}


def test_keys_are_built_by_one_module() -> None:
    """Row 5: keys are built by one module."""
    for where, node in nodes():
        if where.startswith(OTHERS) or not (isinstance(node, ast.JoinedStr) and node.values):
            continue
        begins = node.values[0].value if isinstance(node.values[0], ast.Constant) else ""
        assert not str(begins).startswith(KEY_FAMILIES), f"{where}: {ast.unparse(node)} builds a key"


def test_no_shell_ever() -> None:
    """Row 7: list arguments, never a shell."""
    for where, node in nodes():
        if not (isinstance(node, ast.Call) and called(node) in STARTERS):
            continue
        text = isinstance(node.args[0], ast.Constant | ast.JoinedStr | ast.BinOp)
        assert not text, f"{where}: {ast.unparse(node.args[0])} is one text, not a list of words"
        assert not any(word.arg in ("shell", "executable", "preexec_fn") for word in node.keywords), where
        assert not re.search(r"""['"](ba|da|z)?sh['"]""", ast.unparse(node)), where


@pytest.mark.parametrize("value", ["--name=other", "-x", "a b; id", "$(id)", "gs://b/--help"])
def test_users_values_cannot_become_options(value: str) -> None:
    """Row 7: user values cannot become options: each travels in one word behind its option's own name."""
    units = [learner_unit("iowa", value, threads=1), *syncer_units(value, SyncerSettings(standbys=1))]
    assert len(units) == 3
    for unit in units:
        assert f"--run={value}" in unit.command and value not in unit.command


def test_temporary_files_are_made_by_mkstemp_or_under_a_drawn_name() -> None:
    """Row 17: temporary files by mkstemp in own directories: nobody else's /tmp, no guessable names there."""
    for where, node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if where.startswith("engines/kubernetes.py") and node.value == "/dev/shm":
                continue  # mounted in a pod
            assert not re.match(r"/(tmp|var/tmp|dev/shm)\b", node.value), f"{where}: {node.value}"


def test_certificates_are_always_verified() -> None:
    """Row 18: TLS verified."""
    for where, node in nodes():
        if isinstance(node, ast.keyword) and node.arg in ("verify", "verify_ssl", "ssl", "check_hostname"):
            assert not (isinstance(node.value, ast.Constant) and not node.value.value), where
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("CERT_NONE", "_create_unverified_context"), where


def test_nothing_listens() -> None:
    """Row 16: no listening port by default. `status --serve` has one, and asks for a token; an island's nodes meet at
    the address that the user names."""
    servers = {"socketserver", "http.server", "xmlrpc.server", "wsgiref.simple_server"}
    for where, node in nodes():
        if isinstance(node, ast.ImportFrom | ast.Import) and not where.startswith("metrics/prometheus.py:"):
            names = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            assert not names & servers, where
        if isinstance(node, ast.Call) and not where.startswith("learner/group.py:"):
            assert called(node).rpartition(".")[2] not in ("listen", "start_server", "create_server"), where


def test_every_except_handles_raises_or_records() -> None:
    """Row 24: every `except` handles, re-raises or records: none is bare, none only passes, and one that catches
    everything uses what it caught or raises it again."""
    for where, node in nodes():
        if not isinstance(node, ast.ExceptHandler):
            continue
        assert node.type is not None, f"{where}: bare"
        only_passes = all(
            isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            for line in node.body
        )
        assert not only_passes, f"{where}: passes over an error; say so with contextlib.suppress"
        if ast.unparse(node.type) in ("Exception", "BaseException"):
            inside = list(ast.walk(ast.Module(node.body, [])))
            raises = any(isinstance(inner, ast.Raise) for inner in inside)
            uses = node.name is not None and any(isinstance(n, ast.Name) and n.id == node.name for n in inside)
            assert raises or uses or where.startswith("store/transfers.py"), f"{where}: swallows everything"


def test_nobody_suppresses_everything() -> None:
    """Row 24: `suppress` names what it passes over."""
    for where, node in nodes():
        if isinstance(node, ast.Call) and called(node) in ("suppress", "contextlib.suppress"):
            assert not {ast.unparse(arg) for arg in node.args} & {"Exception", "BaseException"}, where
