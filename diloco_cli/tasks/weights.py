"""The values with which a run begins where they are brought, and the digests by which machines compare weights.

Values come from safetensors alone, never from a pickle. Whoever creates the run reads them, once, and publishes them as
commit 0: every other process has them from the bucket, and builds the architecture only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings
from diloco_cli.digests import digest
from diloco_cli.errors import UsageError
from diloco_cli.layout import ParameterFact
from diloco_cli.tasks import data, huggingface
from diloco_cli.tasks.build import build_model, build_model_on_meta, open_own_data
from diloco_cli.tasks.huggingface import misshapen, refuse_other_model
from diloco_cli.tensors.flat import CARRIED, bare_parameters, bare_tensors, parameter_facts, persistent_buffers

Values = Mapping[str, torch.Tensor]
EMBEDDING = re.compile(r"emb|position|(^|\.)w[tp]e\.", re.I)


def brought_values(run: RunSettings) -> Values | None:
    """Every trained parameter by its bare name, and the buffers that are not what every machine's own code makes; None
    if the run begins with what its code makes. Raises UsageError for files that are missing, damaged, or another
    model's."""
    if run.model.weights == "pretrained":
        values: Values = huggingface.pretrained(run.model)
    elif run.model.initial is not None:
        model = build_model_on_meta(run) if run.model.is_built else None
        facts, buffers = (None, {}) if model is None else (parameter_facts(model), persistent_buffers(model))
        values = read_values(find_file(run.model.initial), facts, buffers)
        own = bare_tensors(build_model(run)) if values.keys() & buffers.keys() else {}
        values = {k: v for k, v in values.items() if k not in buffers or not torch.equal(v, own[k])}
    else:
        return None
    for name, value in values.items():
        if not torch.isfinite(value).all():
            hint = "use weights from before they diverged"
            raise UsageError(f"{name} has values that are not finite", where=run.model.brought, hint=hint)
    return values


def seeded_values(run: RunSettings) -> Values:
    """What the model's own code makes."""
    return bare_tensors(build_model(run))


def find_file(name: str) -> Path:
    """In the working directory, or where modules are looked for: last, beside the run file."""
    for folder in [Path.cwd(), *map(Path, sys.path)]:
        if (folder / name).is_file():
            return folder / name
    raise UsageError(
        f"no file {name!r}", where="model.initial", hint="give a safetensors file: beside the run file, or a whole path"
    )


def facts_of_values(values: Values) -> list[ParameterFact]:
    """Of a file's tensors, where nothing builds the model. By their names some are taken for embeddings, which are
    averaged by merges and travel in a fragment of their own."""
    return [
        ParameterFact(name, tuple(value.shape), value.dim() == 2 and EMBEDDING.search(name) is not None)
        for name, value in sorted(values.items())
    ]


def read_values(path: Path, facts: Iterable[ParameterFact] | None, buffers: Values) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file with the names and shapes of these parameters, as `diloco export` writes it, in
    float32 (None: whatever it holds); and those of the model's `buffers` that it brings, in their own types."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            wanted = shapes if facts is None else {fact.name: fact.shape for fact in facts}
            brought = {name: tuple(value.shape) for name, value in buffers.items() if name in shapes}
            refuse_other_model(
                str(path),
                missing=wanted.keys() - shapes.keys(),
                unexpected=shapes.keys() - wanted.keys() - brought.keys(),
                of_another_shape=[
                    misshapen(name, shapes[name], shape)
                    for name, shape in {**wanted, **brought}.items()
                    if shapes.get(name, shape) != shape
                ],
            )
            values = {name: _exact(file.get_tensor(name), name, str(path)) for name in wanted}
            for name in brought:
                value, dtype = file.get_tensor(name), buffers[name].dtype
                values[name] = value if value.dtype == dtype else _exact(value, name, str(path)).to(dtype)
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"is no whole safetensors file: {error}",
            where=str(path),
            hint="copy it anew, or: diloco export RUN -o FILE",
        ) from error
    return values


def _exact(value: torch.Tensor, name: str, where: str) -> torch.Tensor:
    if value.dtype not in CARRIED:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in (value.dtype, *CARRIED)]
        raise UsageError(
            f"{name} is {dtypes[0]}; allowed: {', '.join(dtypes[1:])}", where=where, hint="save it in float32"
        )
    return value.float()


def digest_of_values(values: Values) -> str:
    """Of names, types, shapes and bytes, in the order of names."""
    plain = {name: [str(v.dtype), list(v.shape), digest(_bytes(v))] for name, v in values.items()}
    return digest(json.dumps(plain, sort_keys=True).encode())


def _bytes(value: torch.Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def carried(run: RunSettings, values: Values | None = None) -> RunSettings:
    """The settings with all that other machines need: the config of a Hugging Face model, so that none of them looks
    for a folder or asks the Hub; the digests of the values with which the run begins and of frozen parameters; and what
    own data are, so that none trains on others.
    Raises UsageError if the settings have another digest already."""
    model = run.model
    if model.huggingface and not model.args:
        revision = huggingface.revision_of(model)
        model = replace(model, args=huggingface.read_config_of(model), revision=revision or model.revision)
    if values is not None and model.brought is not None:
        model = replace(model, weights_digest=_as_pinned(model.weights_digest, digest_of_values(values), "weights"))
    frozen = frozen_digest_of(run)
    if run.model.is_built and (frozen is not None or model.frozen_digest is not None):
        model = replace(model, frozen_digest=_as_pinned(model.frozen_digest, frozen, "frozen"))
    run = run if model == run.model else replace(run, model=model)
    if run.data.is_own and not run.data.args:
        pretrained = huggingface.folder_of(model) if model.weights == "pretrained" else None
        facts = data.facts_of(run, open_own_data(run), pretrained)
        run = replace(run, data=replace(run.data, args=facts))
    return run


def _as_pinned(pinned: str | None, found: str | None, what: str) -> str | None:
    if pinned not in (None, found):
        place = f"model.{what}_digest"
        raise UsageError(f"{place}: the digest here is {found}, not {pinned}", where=place)
    return found


def frozen_digest_of(run: RunSettings) -> str | None:
    """The digest of the parameters that are not trained: no version holds them, each machine's code makes its own. None
    without any. Buffers are left out: rotary angles may differ in their last bit from machine to machine."""
    if not run.model.is_built or all(parameter.requires_grad for parameter in build_model_on_meta(run).parameters()):
        return None
    return digest_of_values(_frozen(build_model(run)))


def check_frozen(run: RunSettings, model: torch.nn.Module) -> None:
    """Raises UsageError if this machine's frozen parameters are not those that the run was created with. A model
    without values is not checked."""
    wanted, frozen = run.model.frozen_digest, _frozen(model)
    if wanted is None or any(value.is_meta for value in frozen.values()):
        return
    if digest_of_values(frozen) != wanted:
        raise UsageError(
            f"the {len(frozen)} frozen tensors of the model built here are not those of the run: its deltas would be of"
            " another base",
            where="model.frozen_digest",
            hint="use the same base weights on every island",
        )


def unchecked_frozen(run: RunSettings, model: torch.nn.Module) -> str | None:
    """What to tell of frozen parameters that nobody compares: of a run whose creator had no code to build them."""
    frozen = _frozen(model)
    if run.model.is_built or run.model.frozen_digest is not None or not frozen:
        return None
    return (
        f"{len(frozen)} frozen tensors are not compared between islands, as the run does not have their digest; a new"
        f" run compares them with: --set model.frozen_digest={digest_of_values(frozen)}"
    )


def _frozen(model: torch.nn.Module) -> Values:
    return {name: value for name, value in bare_parameters(model).items() if not value.requires_grad}
