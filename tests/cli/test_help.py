"""Help, the list of commands, and what the shell completes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco_cli import __version__
from diloco_cli.cli.main import COMMANDS, HIDDEN, app
from diloco_cli.runtime.registry import remember_run
from tests.cli.conftest import Diloco, called
from tests.forked import ROOT
from tests.tidy.test_layers import HEAVY

ROOT_COMMAND: Any = typer.main.get_command(app)


def command_of(words: list[str]) -> tuple[Any, Any, list[str]]:
    """The context and command that these words choose, and the words that are left for it."""
    context = ROOT_COMMAND.make_context("diloco", [], resilient_parsing=True)
    command = ROOT_COMMAND
    while words and hasattr(command, "get_command") and (found := command.get_command(context, words[0])) is not None:
        command, words = found, words[1:]
        context = type(context)(command, info_name=command.name, parent=context)
    return context, command, words


def every_command() -> list[list[str]]:
    groups = {name: command_of([name]) for name in (*COMMANDS, *HIDDEN)}
    parts = [[name, part] for name, (context, group, _) in groups.items() if hasattr(group, "list_commands")
             for part in group.list_commands(context)]  # fmt: skip
    return [[], *([name] for name in groups), *parts]


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_h_is_help_everywhere(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, *words, "-h") == 0
    assert capsys.readouterr().out.startswith("Usage: diloco")


def test_the_list_of_commands_is_grouped_and_fits_80_columns(diloco: Diloco) -> None:
    lines = diloco("-h").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    begin, train = lines.index("Begin:"), lines.index("Train:")
    assert lines[begin + 1].split()[0] == "init" and lines[train + 1].split()[0] == "launch"
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS]
    assert listed == list(COMMANDS), "every command once, on a line of its own"


@pytest.mark.parametrize("example", [each for listed in COMMANDS.values() for each in listed.examples])
def test_examples_have_words_that_the_commands_know(example: str) -> None:
    context, command, rest = command_of(shlex.split(example)[1:])
    assert command.make_context(command.name, rest, parent=context).params is not None
    assert COMMANDS[example.split()[1]].examples


def test_an_unknown_command_names_the_nearest_ones(diloco: Diloco) -> None:
    done = diloco("lauch", "run.yaml")
    assert done.returncode == 2 and "no such command: lauch; did you mean launch?" in done.stderr
    assert "hint: diloco -h" in done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("diloco sta", {"status"}),
        ("diloco status n", {"nano"}),
        ("diloco verify ", {"nano", "other"}),
        ("diloco chaos kill --run nano su", {"supervisor"}),
        ("diloco status missing", set()),
    ],
)
def test_the_shell_completes_commands_runs_units_and_devices(
    diloco: Diloco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, offered: set[str]
) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "home"))
    for name in ("nano", "other"):
        remember_run(f"file://{tmp_path}/bucket/{name}")
    words = {"_DILOCO_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    assert set(diloco(**words).stdout.split()) == offered


def test_completion_is_installed_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'diloco'\n"
        "from diloco_cli.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *words]
        environment |= {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)

    run("--install-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    script = (tmp_path / ".bash_completions" / "diloco.sh").read_text()
    assert "_DILOCO_COMPLETE=complete_bash" in script and "diloco.sh" in (tmp_path / ".bashrc").read_text()
    done = run(_DILOCO_COMPLETE="complete_bash", COMP_WORDS="diloco status x", COMP_CWORD="2")
    assert not HEAVY & set(done.stderr.split())


def test_a_version_is_told_without_what_commands_need() -> None:
    """Each host is asked for it before anything starts there."""
    told = "import sys, diloco_cli.__main__ as it; it.main(); print(len([m for m in sys.modules if m == 'typer']))"
    words = (sys.executable, "-P", "-c", told, "--version")
    assert subprocess.check_output(words, text=True).split() == [__version__, "0"]
