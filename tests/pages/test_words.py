"""The page on operating explains every word of `status` and every kind of event, as the code does.

python -m tests.pages.test_words      writes the tables anew
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from diloco_cli.errors import DilocoError
from diloco_cli.events.event import EVENT_KINDS
from diloco_cli.observe.situation import RUN_STATES
from diloco_cli.observe.unit_states import UNIT_STATES
from tests.pages import ROOT

PAGE = ROOT / "examples" / "operating" / "README.md"
MARKER = re.compile(r"(<!-- words: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
WORDS: dict[str, Mapping[str, str]] = {
    "run": {str(state): word.meaning for state, word in RUN_STATES.items()},
    "unit": {state: word.meaning for state, word in UNIT_STATES.items()},
    "event": {kind.name: kind.meaning for kind in EVENT_KINDS},
}


def table(words: Mapping[str, str]) -> str:
    rows = [f"| `{word}` | {meaning} |" for word, meaning in words.items()]
    return "\n".join(["", "| word | means |", "|---|---|", *rows, "", ""])


def with_words(text: str) -> str:
    return MARKER.sub(lambda match: match[1] + table(WORDS[match[2]]), text)


def test_every_word_is_explained_as_the_code_does() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [match[2] for match in MARKER.finditer(text)] == list(WORDS)
    assert with_words(text) == text, "write them anew: python -m tests.pages.test_words"


def test_every_exit_status_of_an_error_has_a_meaning_on_the_page() -> None:
    rows = re.findall(r"^\| (.*) \|$", PAGE.read_text().split("Exit status:")[1].split("\n## ")[0], re.MULTILINE)
    heads, meanings = ("|".join(rows[row::2]).split("|") for row in (0, 1))
    said = {int(n): meaning for head, meaning in zip(heads, meanings, strict=True) for n in head.split(",")}
    kinds = [DilocoError, *DilocoError.__subclasses__()]
    assert {kind.exit_status for kind in kinds} <= said.keys()
    assert not [meaning for meaning in said.values() if "not used" in meaning]


if __name__ == "__main__":
    PAGE.write_text(with_words(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
