"""Every `diloco` command of every page exists with these options and arguments, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from functools import cache
from typing import Any

import pytest
import typer

from diloco_cli.cli.main import app
from tests.pages import PAGES, ROOT, blocks_of

LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*$")
JOINTS = frozenset({"&&", "||", ";", "|"})


@cache
def the_command() -> Any:
    return typer.main.get_command(app)


def diloco_calls(line: str) -> list[list[str]]:
    """The words after `diloco` of each call in a line of shell."""
    calls: list[list[str]] = [[]]
    for word in shlex.split(line):
        if word in JOINTS or word.startswith((">", "2>")):
            calls.append([])
        elif calls[-1] or not ASSIGNMENT.match(word):
            calls[-1].append(word)
    return [call[1:] for call in calls if call and call[0].rpartition("/")[2] == "diloco"]


def parse(words: list[str]) -> None:
    """Raises a usage error if the product would not take these words. Nothing is run."""
    command, name = the_command(), "diloco"
    while hasattr(command, "get_command"):
        name, *words = words
        command = command.get_command(None, name)
        assert command is not None, f"no such command: {name}"
    command.make_context(name, list(words))


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_are_taken_by_the_product(page: str) -> None:
    for block in blocks_of(page):
        for line in block.commands:
            for words in diloco_calls(line):
                try:
                    parse(words)
                except Exception as error:  # a usage error of typer's, whose class differs by its release
                    pytest.fail(f"{page}: diloco {shlex.join(words)}: {error}")


def test_a_command_that_the_product_does_not_take_is_found() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["status", "--no-such-option"])


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lost = [target for target in LINK.findall(text) if not (ROOT / page).parent.joinpath(target).exists()]
    assert not lost, f"{page}: {lost}"
