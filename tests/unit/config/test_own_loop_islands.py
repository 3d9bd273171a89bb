"""`infra: loop/DATA`: an island that its owner's own loop trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.config.hardware import DATA_CLASSES, data_class_of, infra_of
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.errors import UsageError

TEXT = "version: 1\nstore: {{url: bucket}}\nislands:\n  - {{name: a, region: here, accelerators: 'cpu:1', infra: {}}}\n"


def infra_in(folder: Path, infra: str) -> str:
    path = folder / "inventory.yaml"
    path.write_text(TEXT.format(infra))
    return load_inventory(path).islands[0].infra


@pytest.mark.parametrize("data", DATA_CLASSES)
def test_an_inventory_names_the_class_of_data(tmp_path: Path, data: str) -> None:
    assert infra_in(tmp_path, f"loop/{data}") == infra_of(data) == f"loop/{data}"
    assert data_class_of(f"loop/{data}") == data


@pytest.mark.parametrize(
    ("infra", "words"),
    [
        ("loop/extern", r"inventory.yaml:4: .*must be one of addressed, .*, not 'extern'; did you mean external\?"),
        ("loop", "loop/addressed"),
    ],
)
def test_another_word_is_refused_with_its_place(tmp_path: Path, infra: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        infra_in(tmp_path, infra)


@pytest.mark.parametrize("infra", ["local", "slurm/loop", "loop", "loop/new"])
def test_any_other_island_has_no_loop_of_its_own(infra: str) -> None:
    assert data_class_of(infra) is None
