"""How a run's tensors are called, turned and described in exported files.

The text presets are exported as GPT-2, which they are but for biases: GPT-2 has them, and theirs are zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco_cli.config.huggingface import find_folder
from diloco_cli.config.models import GPTShape, MoEShape, ViTShape
from diloco_cli.config.settings import RunSettings
from diloco_cli.corpus.encoders import TOKENIZER, tokenizer_digest
from diloco_cli.errors import UsageError
from diloco_cli.layout import Layout, shapes_of
from diloco_cli.tasks import huggingface
from diloco_cli.tasks.build import build_model, build_model_on_meta, shape_of
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import CARRIED, bare_model, bare_name
from diloco_cli.tensors.payload import DTYPES, Spec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CARRIED}


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the files that the run exchanges, or its transpose."""

    name: str
    transposed: bool = False


@dataclass(frozen=True)
class Naming:
    """`targets`: of each tensor that the run exchanges, by its name there. `beside`: all others."""

    targets: Mapping[str, tuple[ExportedTensor, ...]]
    beside: Mapping[str, torch.Tensor] = field(default_factory=dict)


def own_names(layout: Layout) -> Naming:
    """What the run exchanges alone, under its names there."""
    return Naming({name: (ExportedTensor(name),) for name in shapes_of(layout)})


def spec_of(naming: Naming, layout: Layout, dtype: torch.dtype | None) -> Spec:
    """The files' tensors, sorted by name. `dtype`: of all but integers and complex ones; None: each has its own."""
    shapes, found = shapes_of(layout), {}
    own = {slot.name: TYPES.get(slot.dtype, torch.float32) for part in layout.fragments for slot in part.tensors}
    own |= {slot.name: getattr(torch, slot.dtype) for part in layout.fragments for slot in part.buffers}
    for name, targets in naming.targets.items():
        for target in targets:
            shape = shapes[name][::-1] if target.transposed else shapes[name]
            found[target.name] = (_stored(own[name], dtype), shape)
    for name, tensor in naming.beside.items():
        found[name] = (_stored(tensor.dtype, dtype), tuple(tensor.shape))
    return dict(sorted(found.items()))


def _stored(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def whole_state(run: RunSettings, layout: Layout, *, tied: bool) -> Naming:
    """All that `load_state_dict` of the run's model demands: what the run does not exchange, too, as the model's code
    builds it. `tied`: under all names of a tensor that has several; else under the first alone. Raises UsageError if
    the code now builds another model than the run's."""
    model = bare_model(build_model_on_meta(run))
    state = {bare_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    _check_same(state, layout)
    trained = {id(state[name]): name for name in shapes_of(layout)}
    targets: dict[str, tuple[ExportedTensor, ...]] = {}
    others = []
    for name, tensor in state.items():
        owner = trained.get(id(tensor))
        if owner is None:
            others.append(name)
        elif tied or name == owner:
            targets[owner] = (*targets.get(owner, ()), ExportedTensor(name))
    return Naming(targets, _built(run, others) if others else {})


def _built(run: RunSettings, names: list[str]) -> dict[str, torch.Tensor]:
    model = build_model(run)
    check_frozen(run, model)
    state = bare_model(model).state_dict()
    values = {bare_name(name): tensor for name, tensor in state.items()}
    for name in names:
        kind = values[name].dtype if isinstance(values[name], torch.Tensor) else type(values[name]).__name__
        if kind not in DTYPES:
            raise UsageError(
                f"{name} is {str(kind).removeprefix('torch.')}, which is not written to safetensors files",
                where="model",
                hint="diloco export --to safetensors: what the run trains, without the rest of the model",
            )
    return {name: values[name] for name in names}


def _check_same(state: Mapping[str, torch.Tensor | nn.Parameter], layout: Layout) -> None:
    for name, shape in shapes_of(layout).items():
        found = state.get(name)
        if found is None or tuple(found.shape) != shape:
            built = "has no such tensor" if found is None else f"has it as {list(found.shape)}"
            raise UsageError(
                f"the run trains {name} {list(shape)}, and the model that is built here {built}",
                where="model",
                hint="export with the code (and the release of transformers) that trained the run; or --to safetensors",
            )


OF_A_BLOCK = {  # in the preset -> in GPT-2, whose matrices are [in, out]
    "attention_norm": ("ln_1", False),
    "qkv": ("attn.c_attn", True),
    "attention_out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp_in": ("mlp.c_fc", True),
    "mlp_out": ("mlp.c_proj", True),
}


def gpt2_naming(shape: GPTShape) -> Naming:
    width, layers = shape.width, range(shape.layers)
    out = {"qkv": 3 * width, "mlp_in": 4 * width}
    targets = {
        "embedding.weight": (ExportedTensor("transformer.wte.weight"),),
        "positions.weight": (ExportedTensor("transformer.wpe.weight"),),
        "norm.weight": (ExportedTensor("transformer.ln_f.weight"),),
    }
    beside = {"transformer.ln_f.bias": torch.zeros(width)}
    for layer in layers:
        for ours, (theirs, transposed) in OF_A_BLOCK.items():
            name = f"transformer.h.{layer}.{theirs}"
            targets[f"blocks.{layer}.{ours}.weight"] = (ExportedTensor(f"{name}.weight", transposed),)
            beside[f"{name}.bias"] = torch.zeros(out.get(ours, width))
    return Naming(targets, beside)


def gpt2_config(shape: GPTShape) -> dict[str, Any]:
    """config.json. Bytes have no symbol that begins or ends a text."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": shape.vocabulary,
        "n_positions": shape.sequence,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": 4 * shape.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


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
