"""Names on the Hugging Face Hub, and a model's size from its config.json alone: no torch, no transformers, no network.

A name is OWNER/NAME or OWNER/NAME@REVISION, with hf:// before it or not. One without an owner needs that: a word alone
is a folder, which may be mistyped. Models and tokenizers are found in the cache of the Hub's downloads.

The counts follow the architectures' published definitions; each is checked against a known model's total in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.config.codec import parse_object, replace
from diloco_cli.config.models import ModelFacts
from diloco_cli.config.settings import ModelSettings
from diloco_cli.environment import environment_value
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.paths import home

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
MAX_INDEX_BYTES = 64_000_000
MAX_CONFIG_BYTES = 1_000_000
MAX_DEFAULT_SEQUENCE = 1024  # tokens; many models allow 100 times more, which is too much for a default
_PART = r"[A-Za-z0-9_][\w.-]*"
HUB = "hf://"
_NAME = re.compile(rf"({HUB}({_PART}/)?|{_PART}/){_PART}(@{_PART}(/{_PART})*)?", re.ASCII)
Config = dict[str, Any]


@dataclass(frozen=True)
class _Layer:
    """One layer's parameters and tensors; `idle` of its parameters are not met by a token, `stacked` are of experts
    that share a tensor, which is no matrix, or of their router."""

    parameters: int
    tensors: int
    idle: int = 0
    stacked: int = 0


def read_config(name: str, folders: Iterable[Path], revision: str | None = None) -> tuple[Config, Path]:
    """config.json of a model's folder, or of a Hub name that was downloaded before; and the folder it lies in.

    `folders`: where a relative folder is looked for. Raises UsageError if it is nowhere, or no JSON object.
    """
    place = find_folder(name, folders, revision)
    if place is None:
        at, wanted = (f" at revision {revision}", f" --revision {revision}") if revision else ("", "")
        raise UsageError(
            f"no folder {name!r} with a {CONFIG}, and no model of that name{at} in the Hub's cache",
            where="model.huggingface",
            hint=f"hf download {name} {CONFIG}{wanted}, or give a folder: beside the run file, here, or a whole path",
        )
    try:
        with (place / CONFIG).open("rb") as stream:
            return parse_object(stream.read(MAX_CONFIG_BYTES + 1), MAX_CONFIG_BYTES), place
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(place / CONFIG)) from error


def find_folder(name: str, folders: Iterable[Path], revision: str | None = None) -> Path | None:
    """The model's folder in the first of `folders` that has it, else its snapshot in the Hub's cache: of `revision`, a
    branch or a commit, or else the newest of main. Raises UsageError for a revision of a folder."""
    for folder in folders:
        if (folder / name / CONFIG).is_file():
            if revision is not None:
                raise UsageError(f"model.revision: {folder / name} is a folder, and has none", where="model.revision")
            return folder / name
    return snapshot(name, revision, CONFIG)


def check_weights(model: ModelSettings, folder: Path) -> None:
    """Raises UsageError where the folder has weights and nothing says what to do with them, and where those that the
    run is to begin with are missing, whole or in part."""
    name, found = model.huggingface, sorted(path.name for path in folder.glob("*.safetensors"))
    others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if model.weights is None and model.initial is None and (found or others):
        raise UsageError(
            f"{name} holds weights ({(found or others)[0]}), and nothing says whether the run begins with them",
            where="model.weights",
            hint="--set model.weights=pretrained, or --set model.weights=random",
        )
    if model.weights == "pretrained":
        missing = _missing_files(folder)
        if missing:
            why = f"; {others[0]} is a pickle, which is not read" if others and not found else ""
            raise UsageError(
                f"the weights of {name} are not all there: {', '.join(missing[:3])} is missing{why}",
                where=str(folder),
                hint=f"hf download {name}, or save the model anew: save_pretrained(FOLDER)",
            )


def _missing_files(folder: Path) -> list[str]:
    """The names of the files that the folder's weights would need."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [] if (folder / WEIGHTS).is_file() else [WEIGHTS]
    try:
        with (folder / INDEX).open("rb") as stream:
            files = parse_object(stream.read(MAX_INDEX_BYTES + 1), MAX_INDEX_BYTES).get("weight_map")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(folder / INDEX)) from error
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UsageError("has no weight_map from names to files", where=str(folder / INDEX))
    return [file for file in sorted(set(files.values())) if not (folder / file).is_file()]


def facts_of_config(config: Config, where: str, wanted_sequence: int | None = None) -> ModelFacts:
    """The model's facts, for sequences of `wanted_sequence` tokens (see `sequence_of`). Raises UsageError for an
    architecture that is not counted here."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        near = suggestion(str(kind), ARCHITECTURES)
        raise UsageError(
            f"model_type: the size of {kind!r} is not known here; known: {', '.join(ARCHITECTURES)}{near}",
            where=where,
            hint="say it beside the name: model: {huggingface: ..., parameters: 1.0B, layers: 16, width: 2048, "
            "sequence: 2048}",
        )
    facts = ARCHITECTURES[kind](_Numbers(config, where))
    return replace(facts, sequence=sequence_of(facts.sequence, wanted_sequence, "model.sequence"))


def sequence_of(longest: int, wanted: int | None, where: str) -> int:
    """Tokens in a training sequence: as the run file says, else 1,024 or what the model allows."""
    if wanted is not None and wanted > longest:
        raise UsageError(
            f"model.sequence: {wanted} is longer than the model's positions ({longest})",
            where=where,
            hint=f"--set model.sequence={longest}",
        )
    return wanted or min(longest, MAX_DEFAULT_SEQUENCE)


class _Numbers:
    """A config's whole numbers, by name; a missing or wrong one is an error with its place."""

    def __init__(self, config: Config, where: str) -> None:
        self.config, self.where = config, where

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{key}: must be a whole number of at least 1, not {value!r}", where=self.where)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)


def _facts(
    n: _Numbers,
    layers: int,
    width: int,
    sequence: int,
    tables: int,
    layer: _Layer,
    norm: int,
    norm_tensors: int,
    tied: bool,
    num_tables: int = 1,
) -> ModelFacts:
    """Input tables (`tables`: their parameters), layers, the last norm, and an output head unless it is tied to the
    input table."""
    head = 0 if tied else n("vocab_size") * width
    return ModelFacts(
        parameters=tables + layers * layer.parameters + norm + head,
        layers=layers,
        width=width,
        sequence=sequence,
        embedding_parameters=tables,
        num_tensors=num_tables + layers * layer.tensors + norm_tensors + (not tied),
        idle_parameters=layers * layer.idle,
        hidden_parameters=layers * (layer.parameters - layer.stacked),
    )


def _gpt2(n: _Numbers) -> ModelFacts:
    """Learned positions, fused qkv, biases everywhere; the head is tied."""
    width, layers, sequence = n("n_embd"), n("n_layer"), n("n_positions")
    layer = _with_biases(width, n("n_inner", 4 * width))
    tables = (n("vocab_size") + sequence) * width
    tied = n.flag("tie_word_embeddings", True)
    return _facts(n, layers, width, sequence, tables, layer, 2 * width, 2, tied, num_tables=2)


def _gpt_neox(n: _Numbers) -> ModelFacts:
    """As GPT-2 with rotary positions and a head of its own."""
    width, layers = n("hidden_size"), n("num_hidden_layers")
    layer = _with_biases(width, n("intermediate_size"))
    tables, tied = n("vocab_size") * width, n.flag("tie_word_embeddings", False)
    return _facts(n, layers, width, n("max_position_embeddings"), tables, layer, 2 * width, 2, tied)


def _with_biases(width: int, inner: int) -> _Layer:
    attention = 4 * width**2 + 4 * width
    mlp = 2 * width * inner + inner + width
    return _Layer(attention + mlp + 4 * width, 12)


def _llama(
    n: _Numbers, *, tied: bool = False, head_width: int | None = None, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelFacts:
    """Rotary positions, grouped queries, a gated MLP of three matrices, norms without biases; `mixtral` has
    `num_local_experts` such MLPs behind a router."""
    width, layers, heads = n("hidden_size"), n("num_hidden_layers"), n("num_attention_heads")
    per_head = n("head_dim", head_width or width // heads)
    queries, keys = heads * per_head, n("num_key_value_heads", heads) * per_head
    attention, tensors = width * (2 * queries + 2 * keys), 4
    if qkv_bias or n.flag("attention_bias", False):
        attention, tensors = attention + queries + 2 * keys, tensors + 3
    if n.flag("attention_bias", False):  # of the output as well
        attention, tensors = attention + width, tensors + 1
    if qk_norm:
        attention, tensors = attention + 2 * per_head, tensors + 2
    mlp = _mlp(n, width)
    layer = _Layer(attention + mlp.parameters + 2 * width, tensors + mlp.tensors + 2, mlp.idle, mlp.stacked)
    tables, is_tied = n("vocab_size") * width, n.flag("tie_word_embeddings", tied)
    return _facts(n, layers, width, n("max_position_embeddings"), tables, layer, width, 1, is_tied)


def _mlp(n: _Numbers, width: int) -> _Layer:
    inner = n("intermediate_size")
    one = 3 * width * inner
    if n.config.get("model_type") != "mixtral":
        biases = n.flag("mlp_bias", False)
        return _Layer(one + (2 * inner + width if biases else 0), 6 if biases else 3)
    experts, active = n("num_local_experts"), n("num_experts_per_tok")
    of_all = experts * (one + width)  # gate and up, and down, stacked; the router
    return _Layer(of_all, 3, (experts - active) * one, of_all)


ARCHITECTURES: dict[str, Callable[[_Numbers], ModelFacts]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "qwen2": lambda n: _llama(n, qkv_bias=True),
    "qwen3": lambda n: _llama(n, head_width=128, qk_norm=True),
    "gemma": lambda n: _llama(n, tied=True, head_width=256),
}


def is_hub_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and ".." not in text


def parted(name: str) -> tuple[str, str | None]:
    """NAME@REVISION -> both, without hf://; a revision is a branch, a tag or a commit."""
    bare, _, revision = name.removeprefix(HUB).partition("@")
    return bare, revision or None


def is_known_to_lack(folder: Path, file: str) -> bool:
    """Whether the Hub has said before that the repository of this snapshot has no such file."""
    return (folder.parents[1] / ".no_exist" / folder.name / file).is_file()


def snapshot(name: str, revision: str | None, file: str) -> Path | None:
    """The folder of a model or tokenizer in the Hub's cache, if it has this file: of `revision`, or else the newest of
    main that was downloaded."""
    cached = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (cached / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision or ""
    found = cached / "snapshots" / commit
    return found if commit and (found / file).is_file() else None


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot in the Hub's cache; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def hub_cache() -> Path:
    """The folder of huggingface_hub's downloads."""
    if (cache := environment_value("HF_HUB_CACHE")) is not None:
        return Path(cache)
    own = environment_value("HF_HOME")
    return (Path(own) if own else home() / ".cache" / "huggingface") / "hub"
