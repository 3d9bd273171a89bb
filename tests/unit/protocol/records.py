"""Records to change one field of."""

from __future__ import annotations

from typing import Any

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import RunSettings, SyncSettings
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.log.commit_log import kept_versions
from diloco_cli.protocol.log.commits import Commit, apply
from diloco_cli.protocol.log.records import FragmentVersion, Island, MergedOffer, Offer, Outcome, RunFormat
from diloco_cli.protocol.log.state import RunState

BATCH = 4


def make_run(fragments: int = 2, **sync: Any) -> RunFormat:
    settings = RunSettings(name="toy", sync=replace(SyncSettings(every=4, fragments=fragments), **sync))
    layout = balanced_layout([ParameterFact(f"w{i}", (3,), False) for i in range(fragments)], fragments)
    islands = tuple(Island(name, "here", BATCH, 4, 100.0, 0.1) for name in ("l0", "l1"))
    return RunFormat("id", "toy", "then", settings, islands, layout, "test")


def with_inner(run: RunFormat, **changes: Any) -> RunFormat:
    train = replace(run.settings.train, inner=replace(run.settings.train.inner, **changes))
    return replace(run, settings=replace(run.settings, train=train))


def with_steps(run: RunFormat, step_s: float) -> RunFormat:
    """Planned to take so long on every island."""
    return replace(run, islands=tuple(replace(island, step_s=step_s) for island in run.islands))


RUN = make_run()


def output(fragment: int, version: int, slot: int) -> FragmentVersion:
    return FragmentVersion(fragment, version, slot, 1, f"state-{version}", f"weights-{fragment}-{version}")


KINDS = {str(kind.__struct_config__.tag): kind for kind in Commit.__subclasses__()}


def commit(state: RunState, kind: str, **fields: Any) -> Any:
    """The next record of this log."""
    defaults: dict[str, Any] = {"n": state.n + 1, "previous": state.digest, "epoch": max(1, state.epoch), "time": "t"}
    if kind == "merge":
        defaults |= {"slot": state.slot, "outputs": (output(0, state.n + 1, state.slot),)}
    return KINDS[kind](**{**defaults, **fields})


def follow(state: RunState, kind: str, run: RunFormat = RUN, **fields: Any) -> RunState:
    record = commit(state, kind, **fields)
    return apply(state, record, f"digest-{record.n}", run.layout, kept_versions(run))


def genesis(run: RunFormat = RUN) -> RunState:
    return follow(RunState(), "epoch_start", run, outputs=tuple(output(f, 0, -1) for f in range(run.num_fragments)))


def applied(learner: str = "l0", seq: int = 0, **fields: Any) -> MergedOffer:
    defaults: dict[str, Any] = {
        "incarnation": 1, "base": 0, "data_start": 0, "data_end": 8, "tokens": 8, "steps": 2, "weight": 32.0,
        "payload_digest": "d", "payload_bytes": 1, "norm": 1.0,
    }  # fmt: skip
    return MergedOffer(learner=learner, seq=seq, **{**defaults, **fields})


def merge(state: RunState, *inputs: MergedOffer, outcomes: tuple[Outcome, ...] = (), run: RunFormat = RUN) -> RunState:
    fragment = state.slot % run.num_fragments
    made = output(fragment, state.n + 1, state.slot)
    return follow(state, "merge", run, slot=state.slot, inputs=inputs, outcomes=outcomes, outputs=(made,), alive=2)


def next_slot(state: RunState, fragment: int, run: RunFormat = RUN) -> int:
    """The first slot of a fragment that the log has not passed."""
    return state.slot + (fragment - state.slot) % run.num_fragments


def offer(state: RunState, fragment: int = 0, **fields: Any) -> Offer:
    """An eligible offer on the current version, for the fragment's next slot; `steps` sets tokens and data_end too."""
    current = state.outputs[fragment]
    start, steps = fields.pop("data_start", 0), fields.pop("steps", 2)
    defaults: dict[str, Any] = {
        "learner": "l0", "incarnation": 1, "seq": 0, "slot": next_slot(state, fragment), "fragment": fragment,
        "base": current.version, "base_digest": current.weights_digest,
        "data_start": start, "data_end": start + steps * BATCH,
        "tokens": steps * BATCH, "steps": steps, "payload_digest": "d", "payload_bytes": 1, "nonce": "n",
    }  # fmt: skip
    return Offer(**{**defaults, **fields})
