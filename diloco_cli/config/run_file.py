"""run.yaml -> RunSettings. The table has the bounds; the checks below relate two keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diloco_cli.config import readers
from diloco_cli.config.build import Builder, Origins, Rule, Rules
from diloco_cli.config.file_kinds import refuse_other_file
from diloco_cli.config.layers import OF_THE_USER, put, put_below, put_environment, read_user_file, refuse_user_keys
from diloco_cli.config.own_data import check_own_data, placed
from diloco_cli.config.presets import BYTE_VOCABULARY, DATA_PRESETS, MODEL_PRESETS, TEXT_DATA, ViTShape, data_of
from diloco_cli.config.readers import (
    above,
    at_least,
    between,
    from_zero_below,
    inside,
    integer,
    number,
    quantity,
)
from diloco_cli.config.settings import (
    AgreementSettings,
    ColdStartSettings,
    DataSettings,
    EvaluationSettings,
    GraceSettings,
    InnerSettings,
    ModelSettings,
    OuterSettings,
    RetentionSettings,
    RunSettings,
    SyncerSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.config.validation import refuse_impossible
from diloco_cli.config.yaml_tree import Node, parse_yaml, read_yaml_file
from diloco_cli.errors import UsageError
from diloco_cli.units import parse_count, parse_duration, parse_size

RUN_VERSION = 1
MAX_FRAGMENTS = 4096
MAX_THREADS = 1024
MAX_SHARDS = 1 << 20
MAX_STANDBYS = 16
SMALLEST_CACHE = 64_000_000  # bytes: the blocks that one reader uses at a time
MAX_VOCABULARY = 1 << 24
SHORTEST_TAKEOVER_S = 6.0  # two heartbeats of a syncer that only waits
COUNT = at_least(1, quantity(parse_count))
WHOLE = at_least(1, integer)
FRACTION = from_zero_below(1, number)

RULES: Rules = {
    RunSettings: {"name": Rule(readers.name)},
    ModelSettings: {
        "preset": Rule(readers.one_of(tuple(MODEL_PRESETS))),
        "entrypoint": Rule(readers.entrypoint),
        "huggingface": Rule(readers.text),
        "revision": Rule(readers.text),
        "initial": Rule(readers.text),
        "weights_digest": Rule(readers.digest),
        "frozen_digest": Rule(readers.digest),
        "parameters": Rule(COUNT),
        "layers": Rule(WHOLE),
        "width": Rule(COUNT),
        "sequence": Rule(COUNT),
        "vocabulary": Rule(between(1, MAX_VOCABULARY, integer)),
    },
    DataSettings: {
        "preset": Rule(readers.one_of(DATA_PRESETS)),
        "entrypoint": Rule(readers.entrypoint),
        "tokens": Rule(readers.text),
        "text": Rule(readers.text),
        "tokenizer": Rule(readers.text),
        "shards": Rule(between(1, MAX_SHARDS, integer)),
        "held_out": Rule(inside(0, 1, number)),
        "cache_bytes": Rule(at_least(SMALLEST_CACHE, quantity(parse_size)), key="cache"),
    },
    TrainSettings: {
        "tokens": Rule(COUNT),
        "batch_tokens": Rule(COUNT),
        "micro_batch_tokens": Rule(readers.either("auto", COUNT)),
        "seed": Rule(between(0, 2**32 - 1, integer)),
        "threads": Rule(between(1, MAX_THREADS, integer)),
    },
    InnerSettings: {
        "lr": Rule(above(0, number)),
        "warmup_steps": Rule(at_least(0, quantity(parse_count))),
        "decay": Rule(inside(0, 1, number)),
        "weight_decay": Rule(at_least(0, number)),
        "beta1": Rule(FRACTION),
        "beta2": Rule(FRACTION),
        "clip_norm": Rule(at_least(0, number)),
        "save_every": Rule(WHOLE),
    },
    SyncSettings: {
        "every": Rule(COUNT),
        "fragments": Rule(between(1, MAX_FRAGMENTS, integer)),
        "overlap": Rule(readers.either("auto", at_least(0, integer))),
        "quorum": Rule(WHOLE),
        "blend": Rule(between(0, 1, number)),
        "clip": Rule(readers.either("none", at_least(1, number))),
        "max_share": Rule(readers.either("none", between(0, 1, number))),
        "staleness_rounds": Rule(WHOLE),
        "drift_rounds": Rule(WHOLE),
        "skip_after_s": Rule(above(0, quantity(parse_duration)), key="skip_after"),
    },
    AgreementSettings: {
        "rebase_from": Rule(between(-1, 1, number)),
        "replace_below": Rule(between(-1, 1, number)),
    },
    GraceSettings: {"gamma": Rule(inside(0, 1, number))},
    OuterSettings: {"lr": Rule(above(0, number)), "momentum": Rule(FRACTION)},
    ColdStartSettings: {
        "rounds": Rule(at_least(0, integer)),
        "learners": Rule(WHOLE),
        "every": Rule(WHOLE),
        "outer_lr": Rule(at_least(0, number)),
        "outer_momentum": Rule(FRACTION),
    },
    SyncerSettings: {
        "standbys": Rule(between(0, MAX_STANDBYS, integer)),
        "takeover_s": Rule(
            readers.either("auto", at_least(SHORTEST_TAKEOVER_S, quantity(parse_duration))), key="takeover"
        ),
    },
    RetentionSettings: {
        "rounds": Rule(readers.either("all", WHOLE)),
        "grace_s": Rule(at_least(0, quantity(parse_duration)), key="grace"),
    },
    EvaluationSettings: {"every": Rule(WHOLE), "sequences": Rule(WHOLE), "jump": Rule(above(0, number))},
}

HINTS: dict[type, str] = {
    ModelSettings: f"a model is one of: preset: {' | '.join(MODEL_PRESETS)}; entrypoint: module:function (and args);"
    " huggingface: NAME or folder; or parameters, layers, width, sequence (for `plan` and `simulate` alone)",
    DataSettings: f"data are one of: preset: {' | '.join(DATA_PRESETS)}; entrypoint: module:function (and args);"
    " tokens: URL or folder of token shards; text: 'FOLDER/**/*.txt' (and tokenizer: FOLDER or NAME)",
}


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run file, with `a.b=value` overrides from --set."""
    return load_run_with_origins(path, overrides)[0]


def load_run_with_origins(
    path: Path | str, overrides: Iterable[str] = (), only_file: bool = False
) -> tuple[RunSettings, Origins]:
    """The settings, and for each key that was given its place: {"sync.every": "run.yaml:12"}. `only_file`: without
    the user's own file and the environment."""
    tree = read_yaml_file(Path(path))
    refuse_other_file(tree, "run file", Path(path))
    refuse_user_keys(tree, "run file")
    if not only_file and isinstance(tree.value, dict):
        put_below(tree, {key: node for key, node in read_user_file().items() if key not in OF_THE_USER})
        put_environment(tree, RULES)
    apply_overrides(tree, overrides)
    refuse_newer(tree, RUN_VERSION)
    builder = Builder(RULES, HINTS)
    run = placed(builder.build(RunSettings, tree), Path(path).parent, builder.origins)
    _check_model(run.model, _place(tree, "model"))
    _check_data(run, _place(tree, "data"))
    refuse_impossible(run, builder.origins, tree.where)
    return run, builder.origins


def apply_overrides(tree: Node, overrides: Iterable[str]) -> Node:
    """The tree with every override put in, in order; names are checked later, as those of the file are."""
    if not isinstance(tree.value, dict):
        raise UsageError("the file must be a mapping of keys", where=tree.where)
    for override in overrides:
        _apply(tree, override)
    return tree


def _apply(tree: Node, override: str) -> None:
    place = f"--set {override}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not text.strip() or not all(keys):
        raise UsageError("cannot be read; write --set key.key=value, for example --set sync.every=40", where=place)
    put(tree, keys, parse_yaml(text, place, fixed_place=True), place)


def inventory_path_of(run: RunSettings, run_path: Path | str) -> Path | None:
    """Where the run file's inventory lies: relative to the run file. None if it names none."""
    return None if run.inventory is None else Path(run_path).parent / run.inventory


def refuse_newer(tree: Node, version: int) -> None:
    """Refuse a file of a newer format, before any of its keys is read."""
    found = tree.value.get("version") if isinstance(tree.value, dict) else None
    if found is None or found.value == version:
        return
    if not isinstance(found.value, int) or isinstance(found.value, bool) or found.value < 1:
        raise UsageError(f"version: must be {version}, not {readers.shown(found)}", where=found.where)
    raise UsageError(
        f"version: {found.value} is newer than this diloco reads ({version})",
        where=found.where,
        hint="pip install --upgrade diloco",
    )


def _check_model(model: ModelSettings, where: str) -> None:
    kinds = [kind for kind in ("preset", "entrypoint", "huggingface") if getattr(model, kind)]
    if len(kinds) > 1:
        raise UsageError(f"model: give one of {' and '.join(kinds)}, not both", where=where)
    numbers = {key: getattr(model, key) for key in ("parameters", "layers", "width", "sequence")}
    given = [key for key, value in numbers.items() if value is not None]
    if model.preset and given:
        raise UsageError(f"model: the preset already says '{given[0]}'; remove one of the two", where=where)
    missing = [key for key, value in numbers.items() if value is None]
    if given and missing and not ((model.huggingface or model.entrypoint) and given == ["sequence"]):
        raise UsageError(f"model: plain numbers need all four; missing: {', '.join(missing)}", where=where)
    if not (kinds or given):
        presets = f"a preset ({', '.join(MODEL_PRESETS)}), an entrypoint, a huggingface name or folder"
        allowed = f"{presets}, or parameters, layers, width and sequence"
        raise UsageError(f"model: nothing says which model; give {allowed}", where=where)
    if model.vocabulary and (not model.preset or isinstance(MODEL_PRESETS[model.preset], ViTShape)):
        raise UsageError("model: vocabulary belongs to a preset that reads text", where=where)
    if model.args and not model.entrypoint:
        raise UsageError("model: args belong to an entrypoint, and there is none", where=where)
    _check_weights(model, where)


def _check_weights(model: ModelSettings, where: str) -> None:
    strays = [key for key in ("weights", "revision") if getattr(model, key) and not model.huggingface]
    if strays:
        hint = "a file of weights, for any kind of model: model.initial: FILE.safetensors"
        raise UsageError(f"model: {strays[0]} belongs to huggingface, and there is none", where=where, hint=hint)
    if model.initial and model.weights == "pretrained":
        raise UsageError("model: give initial or weights: pretrained, not both", where=where)


def _check_data(run: RunSettings, where: str) -> None:
    data = run.data
    kinds = [kind for kind in ("preset", "entrypoint", "tokens", "text") if getattr(data, kind)]
    if len(kinds) > 1:
        raise UsageError(f"data: give one of {' and '.join(kinds)}, not both", where=where)
    trainable = run.model.preset or run.model.entrypoint or run.model.huggingface
    if trainable and not kinds:
        allowed = f"a preset ({', '.join(DATA_PRESETS)}), an entrypoint, tokens or text"
        raise UsageError(f"data: nothing says which data; give {allowed}", where=where)
    check_own_data(run, where)
    if data.preset and (run.model.vocabulary or BYTE_VOCABULARY) < BYTE_VOCABULARY:
        message = f"model.vocabulary: {run.model.vocabulary} is too small: {data.preset} has {BYTE_VOCABULARY} bytes"
        raise UsageError(message, where=where, hint=f"--set model.vocabulary={BYTE_VOCABULARY}")
    fitting = data_of(MODEL_PRESETS[run.model.preset]) if run.model.preset else run.model.huggingface and TEXT_DATA
    if fitting and run.data.preset and run.data.preset != fitting:
        message = f"data.preset: {run.model.preset or run.model.huggingface} reads {fitting}, not {run.data.preset}"
        raise UsageError(message, where=where, hint=f"--set data.preset={fitting}")


def _place(tree: Node, key: str) -> str:
    child: Any = tree.value.get(key) if isinstance(tree.value, dict) else None
    return child.where if child is not None else tree.where
