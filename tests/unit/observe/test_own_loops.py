"""What is said of own loops follows from what the run says of their islands."""

from __future__ import annotations

import pytest

from diloco_cli.observe.own_loops import own_loop_lines, own_loop_note, own_loops
from diloco_cli.protocol.log.records import Island


def island(name: str, infra: str) -> Island:
    return Island(name, "here", 4, 4, 1.0, 1.0, infra=infra)


@pytest.mark.parametrize(
    ("infra", "note", "said"),
    [
        ("local", "slow", "slow"),
        ("loop/addressed", "", "own loop, addressed data"),
        ("loop/external", "slow", "own loop, positions not checked; slow"),
        ("loop/of-a-later-version", "", ""),
    ],
)
def test_the_note_of_an_island_says_what_its_data_is(infra: str, note: str, said: str) -> None:
    assert own_loop_note(island("a", infra), note) == said


def test_verify_has_a_line_for_each_class_of_data_that_there_is() -> None:
    loops = own_loops([island("b", "loop/external"), island("c", "ssh"), island("a", "loop/external")])
    assert loops == {"b": "external", "a": "external"}
    (line,) = own_loop_lines(loops)
    assert line.startswith("own loops, external data: a, b: positions not checked")
