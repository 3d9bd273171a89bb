"""What the Hugging Face Hub's cache holds after a download, made without the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def snapshot_in(home: Path, name: str) -> Path:
    """The folder of the newest snapshot of a model or tokenizer, to be filled; `home`: as $HF_HOME."""
    cached = home / "hub" / f"models--{name.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    return cached / "snapshots" / COMMIT


def datasets_here() -> Any:
    return pytest.importorskip("datasets", reason="datasets is not installed: pip install 'diloco[datasets]'")


def write_dataset(folder: Path, texts: list[str | None], **columns: list[Any]) -> Path:
    """A folder with one parquet file."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets = datasets_here()
    datasets.Dataset.from_dict({"text": texts, **columns}).to_parquet(str(folder / "train-00000-of-00001.parquet"))
    return folder


def prepared_dataset(home: Path, name: str, texts: list[str]) -> None:
    """As `datasets` keeps one that it has loaded from the Hub by this name."""
    made = write_dataset(home / "made", texts)
    found = datasets_here().load_dataset(str(made), split="train", cache_dir=str(home / "first"))
    prepared = Path(found.cache_files[0]["filename"]).parent
    place, bare = home / "datasets" / name.replace("/", "___") / "default" / "0.0.0" / COMMIT, Path(name).name
    shutil.copytree(prepared, place)
    (place / f"{prepared.parts[-4]}-train.arrow").rename(place / f"{bare}-train.arrow")
    said = json.loads((place / "dataset_info.json").read_text())
    (place / "dataset_info.json").write_text(json.dumps(said | {"dataset_name": bare}))
