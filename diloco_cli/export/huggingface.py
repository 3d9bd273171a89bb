"""What a folder for transformers says of the run's model: its architecture, names, configs, tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco_cli.config.huggingface import find_folder
from diloco_cli.config.presets import MoEShape, ViTShape
from diloco_cli.config.settings import RunSettings
from diloco_cli.corpus.encoders import tokenizer_digest
from diloco_cli.corpus.hub import TOKENIZER
from diloco_cli.errors import UsageError
from diloco_cli.export.folder import TOKENIZER_FILES
from diloco_cli.export.naming import Naming, whole_state
from diloco_cli.export.presets import gpt2_config, gpt2_naming
from diloco_cli.layout import Layout
from diloco_cli.tasks import huggingface
from diloco_cli.tasks.build import shape_of


@dataclass(frozen=True)
class Described:
    """A model as transformers knows it."""

    naming: Naming
    config: dict[str, Any]
    generation: dict[str, Any]


def describe(run: RunSettings, layout: Layout, dtype: torch.dtype) -> Described:
    """Raises UsageError for a model that is none of transformers'."""
    dtype_name = str(dtype).removeprefix("torch.")
    if run.model.huggingface:
        config, generation = huggingface.exported_configs(run.model, dtype_name)
        return Described(whole_state(run, layout, tied=False), config, generation)
    if run.model.entrypoint:
        raise _refused(f"{run.model.entrypoint} is code of your own")
    shape = shape_of(run)
    if isinstance(shape, (MoEShape, ViTShape)):
        raise _refused(f"none of its architectures computes what the preset {run.model.preset} does")
    return Described(gpt2_naming(shape), gpt2_config(shape) | {"dtype": dtype_name}, {"do_sample": True})


def _refused(why: str) -> UsageError:
    return UsageError(
        f"this model cannot be loaded by transformers: {why}",
        where="--to hf",
        hint="diloco export --to torch: all that load_state_dict of the model demands",
    )


def tokenizer_of(run: RunSettings, named: Path | None) -> Path | None:
    """The folder of the tokenizer: as named here, else the one of the config that the run was made from, if that lies
    below this directory or in the Hub's cache, and made the run's own data, if it has such; a bucket's word for another
    place is not followed. None: there is none. Raises UsageError if the named one holds none."""
    if named is not None:
        if not _holds_one(named):
            raise UsageError(
                "holds no tokenizer: none of " + ", ".join(TOKENIZER_FILES),
                where=f"--tokenizer {named}",
                hint="AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes one",
            )
        return named
    place = Path(run.model.huggingface or "..")
    if place.is_absolute() or ".." in place.parts:
        return None
    found = find_folder(str(place), [Path.cwd()])
    return found if found is not None and _holds_one(found) and _made_the_data(found, run) else None


def _made_the_data(folder: Path, run: RunSettings) -> bool:
    """Beside weights that saw another one's tokens, or bytes, a tokenizer would be wrong without a word."""
    if not run.data.is_own:
        return True
    return (folder / TOKENIZER).is_file() and tokenizer_digest(str(folder)) == run.data.args.get("tokenizer")


def _holds_one(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def write_configs(described: Described, folder: Path) -> None:
    for name, content in (("config.json", described.config), ("generation_config.json", described.generation)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
