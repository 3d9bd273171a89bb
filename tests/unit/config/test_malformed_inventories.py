"""Malformed inventories and exactly what is said about them: one readable file each in golden/.

A file is what is wrong with it, `--- inventory.yaml`, (if there is one) `--- hosts.txt`, `--- expected`. Nothing
rewrites these files: whoever changes a message changes them by hand, and reads what users will read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.cli.output import report_error
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.errors import UsageError

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.txt"))


def sections(path: Path) -> dict[str, str]:
    """By name: the text of each part."""
    _, *parts = path.read_text().split("\n--- ")
    return {name: text + "\n" for name, _, text in (part.partition("\n") for part in parts)}


def test_there_are_at_least_thirty_of_them_and_each_has_its_parts():
    assert len(GOLDEN) >= 30
    for path in GOLDEN:
        assert {"inventory.yaml", "expected"} <= set(sections(path)) <= {"inventory.yaml", "hosts.txt", "expected"}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_malformed_inventory_is_refused_in_these_words(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parts = sections(path)
    expected = parts.pop("expected").rstrip("\n")
    for name, text in parts.items():
        Path(name).write_text(text)
    with pytest.raises(UsageError) as caught:
        load_inventory("inventory.yaml")
    report_error(caught.value)
    said = capsys.readouterr().err.rstrip("\n")
    assert said == expected
    first, hint = said.split("\n")
    assert first.startswith(("error: inventory.yaml:", "error: hosts.txt:")) and hint.startswith("hint: ")
