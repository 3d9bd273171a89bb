"""run.yaml -> RunSettings, with the layers above and below the file.

--set > DILOCO_TRAIN_TOKENS > run.yaml > ~/.config/diloco/config.yaml > default. A variable is the key in capitals, with
`_` for each dot: DILOCO_SYNC_GRACE_GAMMA is sync.grace.gamma. The user's file has the sections of run.yaml that are no
single run's.

Refuses settings that are each well formed and cannot work together, before any training starts.

Every refusal names its place, what is allowed, and a suggestion."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from diloco_cli.config.codec import replace
from diloco_cli.config.fields import (
    AUTO,
    Node,
    Origins,
    SettingsReader,
    Value,
    fields_of,
    keys_of,
    parse_yaml,
    read_yaml_file,
    refuse_newer,
    refuse_other_file,
    shown,
    text,
)
from diloco_cli.config.hardware import data_class_of
from diloco_cli.config.huggingface import is_hub_name
from diloco_cli.config.models import BYTE_VOCABULARY, DATA_PRESETS, MODEL_PRESETS, TEXT_DATA, ViTShape, data_of
from diloco_cli.config.settings import DataSettings, Inventory, ModelSettings, OuterSettings, RunSettings
from diloco_cli.environment import environment_value, environment_with_prefix
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.methods import CODECS
from diloco_cli.paths import user_file
from diloco_cli.quantities import format_count
from diloco_cli.store.url import is_url, normalise_store_url, without_tilde

RUN_VERSION = 1
PREFIX = "DILOCO_"
OF_THE_USER = ("on_event", "webhook")
OF_ONE_RUN = frozenset({"name", "version", "inventory", "model", "data"})
SECTIONS = tuple(key for key in fields_of(RunSettings) if key not in OF_ONE_RUN)


def load_run(path: Path | str, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run file, with `a.b=value` overrides from --set."""
    return load_run_with_origins(path, overrides)[0]


def load_run_with_origins(path: Path | str, overrides: Iterable[str] = ()) -> tuple[RunSettings, Origins]:
    """The settings, and for each key that was given its place: {"sync.every": "run.yaml:12"}."""
    tree = read_yaml_file(Path(path))
    refuse_other_file(tree, "run file", Path(path))
    refuse_user_keys(tree, "run file")
    if isinstance(tree.value, dict):
        put_below(tree, {key: node for key, node in read_user_file().items() if key not in OF_THE_USER})
        put_environment(tree)
    apply_overrides(tree, overrides)
    refuse_newer(tree, RUN_VERSION)
    _refuse_keys_of_the_inventory(tree)
    reader = SettingsReader(Path(path).parent)
    run = _placed(reader.read(RunSettings, tree), reader.folder, reader.origins)
    check_model(run.model, _place(tree, "model"))
    check_data(run, _place(tree, "data"))
    refuse_impossible(run, reader.origins, tree.where)
    return run, reader.origins


def _refuse_keys_of_the_inventory(tree: Node) -> None:
    """They are no misspelled keys of a run file."""
    if isinstance(tree.value, dict):
        for key in (key for key in tree.value if key in fields_of(Inventory) and key not in fields_of(RunSettings)):
            problem, hint = f"'{key}' is a key of the inventory, not of a run file", "change it in the inventory's file"
            raise UsageError(problem, where=tree.value[key].where, hint=hint)


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


def _placed(run: RunSettings, folder: Path, origins: Origins) -> RunSettings:
    """The run with absolute places of its data: a relative path is beside the run file, in `folder`."""
    data = run.data
    try:
        tokens = normalise_store_url(data.tokens, folder) if data.tokens else None
    except UsageError as error:
        raise UsageError(f"data.tokens: {error.message}", where=origins.get("data.tokens"), hint=error.hint) from None
    texts = _local(data.text, "text", folder, origins)
    tokenizer = data.tokenizer
    if tokenizer is None or not is_hub_name(tokenizer) or os.path.isdir(_absolute(tokenizer, folder)):
        tokenizer = _local(tokenizer, "tokenizer", folder, origins)
    return replace(run, data=replace(data, tokens=tokens, text=texts, tokenizer=tokenizer))


def _local(path: str | None, key: str, folder: Path, origins: Origins) -> str | None:
    """An absolute path or pattern on this machine."""
    if path is not None and is_url(path):
        raise UsageError(
            f"data.{key}: must be a path on this machine, not a URL",
            where=origins.get(f"data.{key}"),
            hint="diloco data tokenize FILES -o gs://BUCKET/PREFIX, then data: {tokens: gs://BUCKET/PREFIX}",
        )
    return None if path is None else _absolute(path, folder)


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder.absolute() / without_tilde(path))


def _place(tree: Node, key: str) -> str:
    child = tree.value.get(key) if isinstance(tree.value, dict) else None
    return child.where if child is not None else tree.where


def put_environment(tree: Node) -> None:
    """Every DILOCO_<SECTION>_<KEY> into the tree. Raises UsageError if the section has no such key; other variables of
    this prefix are no settings of a run."""
    known = {PREFIX + path.upper().replace(".", "_"): path for path in variables()}
    sections = tuple(f"{PREFIX}{name.upper()}_" for name in (*SECTIONS, "model", "data"))
    for variable, value in sorted(environment_with_prefix(PREFIX).items()):
        if variable in known:
            put(tree, known[variable].split("."), parse_yaml(value, variable, fixed_place=True), variable)
        elif variable.startswith(sections):
            near = suggestion(variable, known)
            raise UsageError(
                f"no key of a run file has this name{near}", where=variable, hint="unset it, or correct it"
            )


def variables() -> list[str]:
    """The settings that have a variable: all but those at the top, which are of one run alone."""
    return [path for path, _ in keys_of(RunSettings) if "." in path]


def put(tree: Node, keys: list[str], value: Node, place: str) -> None:
    """One value into the tree, with the mappings that lead to it."""
    for key in keys[:-1]:
        tree = _mapping(tree, key, place).setdefault(key, Node({}, place))
    _mapping(tree, keys[-1], place)[keys[-1]] = value


def _mapping(node: Node, key: str, place: str) -> dict[str, Node]:
    inside = _spread(node)
    if not isinstance(inside, dict):
        raise UsageError(f"'{key}' lies inside a value that is no mapping", where=place)
    return inside


def _spread(node: Node) -> Value:
    """The value; for `outer: auto` the keys that this stands for, so that one of them may be given elsewhere."""
    if node.value == AUTO:
        node.value = dict.fromkeys(OuterSettings.AUTO, Node(AUTO, node.where, AUTO))
    return node.value


def read_user_file() -> dict[str, Node]:
    """The sections of the user's own file; none if there is no such file."""
    path, allowed = user_file(), SECTIONS + OF_THE_USER
    if not path.is_file():
        return {}
    tree = read_yaml_file(path)
    if not isinstance(tree.value, dict):
        raise UsageError(f"the file must be a mapping of keys, not {shown(tree)}", where=tree.where)
    for key, child in tree.value.items():
        if key not in allowed:
            whose = "belongs to one run, not to all" if key in OF_ONE_RUN else "is unknown"
            raise UsageError(
                f"the key '{key}' {whose}{suggestion(key, allowed)}; allowed: {', '.join(allowed)}", where=child.where
            )
    return tree.value


def read_user_text(name: str) -> tuple[str, str]:
    """(the text of a key of OF_THE_USER, its place): from its variable, else from the user's own file, else ""."""
    variable = f"{PREFIX}{name.upper()}"
    told = environment_value(variable)
    if told is not None:
        return told, variable
    node = read_user_file().get(name)
    return ("", "") if node is None else (text(node), node.where)


def refuse_user_keys(tree: Node, what: str) -> None:
    """Raises UsageError if a file of the run has a key that is the user's own: who may write the file, or the bucket
    that it goes to, must not choose what runs on this machine."""
    for key in OF_THE_USER:
        if isinstance(tree.value, dict) and key in tree.value:
            raise UsageError(
                f"the key '{key}' does not belong into a {what}: it names what this machine runs or calls",
                where=tree.value[key].where,
                hint=f"put it into {user_file()}, or give --{key.replace('_', '-')} to launch or resume",
            )


def put_below(tree: Node, defaults: dict[str, Node]) -> None:
    """What the tree does not say itself."""
    if not isinstance(tree.value, dict):
        return
    for key, value in defaults.items():
        if key not in tree.value:
            tree.value[key] = value
        elif isinstance(tree.value[key].value, dict) and isinstance(inside := _spread(value), dict):
            put_below(tree.value[key], inside)


SMALLEST_CACHE = 64_000_000  # bytes: the blocks that one reader uses at a time
SHORTEST_TAKEOVER_S = 6.0  # two heartbeats of a syncer that only waits


def refuse_impossible(run: RunSettings, origins: Origins, default_place: str) -> None:
    """The checks that need the run file alone. `default_place`: the place of keys that were not given."""
    place = _Places(origins, default_place)
    _check_overlap(run, run.sync.fragments, place)
    _check_mixing(run, place)
    _check_length(run, place)
    _check_decay(run, origins, place)
    _check_cold_start(run, place)
    if run.outer.name != "nesterov" and "auto" in (run.outer.lr, run.outer.momentum):
        problem = f"'auto' is known for nesterov alone, not for {run.outer.name}"
        place.refuse("outer.lr", problem, "--set outer.lr=0.7")
    if run.data.cache_bytes < SMALLEST_CACHE:
        place.refuse("data.cache", f"must be at least {SMALLEST_CACHE / 1e6:g} MB, not {run.data.cache_bytes}", "4 GB")
    if run.syncer.takeover_s != "auto" and run.syncer.takeover_s < SHORTEST_TAKEOVER_S:
        problem = f"must be at least {SHORTEST_TAKEOVER_S:g} s, not {run.syncer.takeover_s:g} s; 'auto' is allowed too"
        place.refuse("syncer.takeover", problem, "--set syncer.takeover=auto")
    preset = MODEL_PRESETS.get(run.model.preset or "")
    _check_micro_batch(run, (preset.sequence if preset else run.model.sequence) or 1, place)


def refuse_together(
    run: RunSettings,
    origins: Origins,
    inventory: Inventory,
    num_fragments: int,
    default_place: str,
    sequence: int = 1,
) -> None:
    """The checks that need the islands and the model; for islands that are still to be formed, the plan makes them.
    `num_fragments`: that the model gives; `sequence`: the model's, in tokens; 1 if only its own code knows it."""
    count, place = len(inventory.islands), _Places(origins, default_place)
    _check_micro_batch(run, sequence, place)
    _check_overlap(run, num_fragments, place)
    if inventory.machines or not inventory.islands:  # none yet where all are to be rented
        return
    if run.sync.quorum > count:
        place.refuse(
            "sync.quorum",
            f"{run.sync.quorum} islands can never take part, the inventory has {count}; allowed: 1 to {count}",
            f"--set sync.quorum={count}",
        )
    if run.syncer.on_learners and all(data_class_of(island.infra) for island in inventory.islands):
        place.refuse(
            "syncer.on_learners",
            "nobody would serve the run: loops of your own train all its islands, and no diloco learner hosts a syncer",
            "--set syncer.on_learners=false",
        )
    if run.data.shards is not None and run.data.shards < count:
        place.refuse(
            "data.shards",
            f"{run.data.shards} shards are too few for the {count} islands of the inventory: each needs its own",
            f"--set data.shards={count}, or more if islands are to join later",
        )


def max_overlap(every: int, num_fragments: int) -> int:
    """The largest tau, in slots of H / P steps. The paper's bound is tau < H in steps: tau * H / P <= H - 1: one step
    at least lies between a fragment's adoption and its next sending, or there would be nothing to send. At H >= P that
    is P - 1. The drift bound (at least one round) is then never below the overlap either."""
    return num_fragments * (every - 1) // every


def overlap_problem(overlap: int, every: int, num_fragments: int) -> str | None:
    """Why tau cannot be `overlap` slots where a round of `every` steps has `num_fragments` slots; None if it can."""
    longest = max_overlap(every, num_fragments)
    if overlap <= longest:
        return None
    return (
        f"{overlap} slots do not fit into a round of {every} steps and {num_fragments} slots (one a fragment): "
        f"a fragment would be sent again before it came back; allowed: 0 to {longest}, or auto"
    )


class _Places:
    """The place at which each key was given."""

    def __init__(self, origins: Origins, default_place: str) -> None:
        self._origins, self._default = origins, default_place

    def refuse(self, key: str, problem: str, hint: str) -> NoReturn:
        raise UsageError(f"{key}: {problem}", where=self._origins.get(key, self._default), hint=hint)


def _check_overlap(run: RunSettings, num_fragments: int, place: _Places) -> None:
    sync = run.sync
    if sync.overlap == "auto" or not (problem := overlap_problem(sync.overlap, sync.every, num_fragments)):
        return
    if num_fragments < sync.fragments:
        problem += f"; the model is too small for more than {num_fragments} fragments"
    place.refuse("sync.overlap", problem, "--set sync.overlap=auto")


def _check_mixing(run: RunSettings, place: _Places) -> None:
    sync = run.sync
    if sync.error_feedback and not CODECS[sync.codec].rounds:
        place.refuse(
            "sync.error_feedback",
            f"the codec {sync.codec} rounds nothing away, so nothing can be fed back; it needs a lossy sync.codec",
            "--set sync.codec=int8, or --set sync.error_feedback=false",
        )


def _check_length(run: RunSettings, place: _Places) -> None:
    """H must be reachable: a run that ends within its first round never merges some of its fragments."""
    train, sync = run.train, run.sync
    one_round = sync.every * train.batch_tokens
    if train.tokens < one_round:
        fewer = train.tokens // train.batch_tokens
        or_fewer = f", or --set sync.every={fewer} or less" if fewer else ""
        place.refuse(
            "train.tokens",
            f"{format_count(train.tokens)} end before the first round of one island does: sync.every x "
            f"train.batch_tokens = {sync.every} x {format_count(train.batch_tokens)} = {format_count(one_round)}",
            f"--set train.tokens={one_round} or more{or_fewer}",
        )


def _check_decay(run: RunSettings, origins: Origins, place: _Places) -> None:
    schedule, key = run.train.inner.schedule, "train.inner.decay"
    if key in origins and schedule != "wsd":
        place.refuse(key, f"it has no effect on the schedule {schedule}: it is wsd's", "--set train.inner.schedule=wsd")


def _check_cold_start(run: RunSettings, place: _Places) -> None:
    if run.cold_start.rounds and run.sync.quorum > 1:
        place.refuse(
            "cold_start.rounds",
            f"one island alone cannot make a merge, which needs {run.sync.quorum} (sync.quorum)",
            "--set sync.quorum=1, or --set cold_start.rounds=0",
        )


def _check_micro_batch(run: RunSettings, sequence: int, place: _Places) -> None:
    """A forward pass takes whole sequences. More than a batch is allowed: then a batch is one pass."""
    tokens = run.train.micro_batch_tokens
    if tokens == "auto" or tokens % sequence == 0:
        return
    whole = max(1, round(tokens / sequence)) * sequence
    place.refuse(
        "train.micro_batch_tokens",
        f"{tokens} tokens are no whole number of sequences of {sequence}; allowed: multiples of {sequence}, or auto",
        f"--set train.micro_batch_tokens={whole}, or --set train.micro_batch_tokens=auto",
    )


def check_model(model: ModelSettings, where: str) -> None:
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
    reads_text = model.preset and not isinstance(MODEL_PRESETS[model.preset], ViTShape)
    if model.vocabulary and not reads_text and (kinds or missing):
        raise UsageError("model: vocabulary belongs to a preset that reads text, or to plain numbers", where=where)
    if model.vocabulary and model.parameters and model.vocabulary * (model.width or 0) >= model.parameters:
        embedding = f"an embedding of vocabulary x width = {model.vocabulary * (model.width or 0):,}"
        problem = f"model: {embedding} parameters leaves none of the model's {model.parameters:,} to its layers"
        raise UsageError(problem, where=where)
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


def check_data(run: RunSettings, where: str) -> None:
    data = run.data
    kinds = [kind for kind in ("preset", "entrypoint", "tokens", "text") if getattr(data, kind)]
    if len(kinds) > 1:
        raise UsageError(f"data: give one of {' and '.join(kinds)}, not both", where=where)
    trainable = run.model.preset or run.model.entrypoint or run.model.huggingface
    if trainable and not kinds:
        allowed = f"a preset ({', '.join(DATA_PRESETS)}), an entrypoint, tokens or text"
        raise UsageError(f"data: nothing says which data; give {allowed}", where=where)
    _check_own_data(run, where)
    if data.preset and (run.model.vocabulary or BYTE_VOCABULARY) < BYTE_VOCABULARY:
        message = f"model.vocabulary: {run.model.vocabulary} is too small: {data.preset} has {BYTE_VOCABULARY} bytes"
        raise UsageError(message, where=where, hint=f"--set model.vocabulary={BYTE_VOCABULARY}")
    fitting = data_of(MODEL_PRESETS[run.model.preset]) if run.model.preset else run.model.huggingface and TEXT_DATA
    if fitting and run.data.preset and run.data.preset != fitting:
        message = f"data.preset: {run.model.preset or run.model.huggingface} reads {fitting}, not {run.data.preset}"
        raise UsageError(message, where=where, hint=f"--set data.preset={fitting}")


def _check_own_data(run: RunSettings, where: str) -> None:
    """Raises UsageError for keys that have no effect, and for a model that reads no text."""
    data, usual = run.data, DataSettings()
    if data.args and not data.entrypoint:
        raise UsageError("data: args belong to an entrypoint, and there is none", where=where)
    if data.is_own:
        if run.model.preset and isinstance(MODEL_PRESETS[run.model.preset], ViTShape):
            raise UsageError(f"data: {run.model.preset} reads images, not tokens", where=where)
        return
    idle = [key for key in ("tokenizer", "held_out", "cache_bytes") if getattr(data, key) != getattr(usual, key)]
    if idle:
        key = idle[0].removesuffix("_bytes")
        raise UsageError(f"data.{key}: it has an effect on tokens and text alone", where=where)
