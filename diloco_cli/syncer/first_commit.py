"""The beginning of a run by the process that creates it: it writes commit 0, and leaves.

So no other machine needs the files of weights that are brought, and no syncer the model's code: syncers find a log that
has begun, and learners the versions that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite

import torch
from msgspec import structs

from diloco_cli.config.settings import RunSettings
from diloco_cli.digests import digest
from diloco_cli.errors import FencedError
from diloco_cli.protocol.actors.evaluating import Evaluations
from diloco_cli.protocol.actors.merging import write_surely
from diloco_cli.protocol.log.commit_log import append, read_log
from diloco_cli.protocol.log.commits import Commit, EpochStart, Evaluation
from diloco_cli.protocol.log.epochs import claim_epoch
from diloco_cli.protocol.log.keys import state_key, weights_key
from diloco_cli.protocol.log.operations import Steps
from diloco_cli.protocol.log.records import FragmentVersion, ProcessClaim, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.divergence import evaluates_every
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.syncer.versions import first_state
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tasks.weights import Values
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.names import bare_parameters

MAX_EVALUATED = 20_000_000  # parameters: the loss of more takes minutes on a CPU, and the syncer's evaluator has time
Version = tuple[bytes, bytes]  # state and weights


def begin(
    run: RunFormat, versions: Iterable[Version], claim: ProcessClaim, time_text: Callable[[], str],
    nonce: Callable[[], str], loss: Callable[[], float | None] = lambda: None,
) -> Steps[RunState]:  # fmt: skip
    """Commit 0 with these versions, one of each fragment, and a commit with their `loss`, unless that is None. Nothing
    if the log has begun. `versions` are made one by one, as they are written."""
    state: RunState = yield from read_log(run)
    if state.n >= 0:
        return state
    try:
        epoch = yield from claim_epoch(run, claim, state)
        outputs = []
        for fragment, version in enumerate(versions):
            outputs.append((yield from _published(fragment, version, epoch)))
        reason = f"{claim.host} pid {claim.pid}, with {run.settings.model.brought or 'the values of the seed'}"
        drafts: list[Callable[[], Commit | None]] = [
            lambda: EpochStart(outputs=tuple(outputs), reason=reason, serves=False),
            lambda: _evaluation(loss()),
        ]
        for draft in drafts:
            made = draft()
            if made is not None:
                mine = structs.replace(made, epoch=epoch, nonce=nonce(), time=time_text(), software=claim.software)
                state, appended = yield from append(run, state, mine)
                if not appended:
                    break  # another process was faster: what it has begun with need not have this loss
        return state
    except FencedError:  # the same, or a syncer has begun to serve already
        return (yield from read_log(run, state))


def _evaluation(loss: float | None) -> Commit | None:
    return None if loss is None else Evaluation(evaluated=0, loss=loss if isfinite(loss) else None, tokens=0)


def first_versions(run: RunFormat, values: Values) -> Iterator[Version]:
    """(state, weights) of one fragment after the other."""
    for fragment in run.layout.fragments:
        blank = first_state(fragment, values, run.settings.outer.name)
        weights = codec(run.settings.sync.weights_codec).to_bytes(blank.tensors["parameters"])
        yield blank.seal(), weights


def first_loss(settings: RunSettings, values: Values) -> float:
    """The held-out loss of these values, as the evaluator computes it. The code that the settings name is run."""
    model = build_model(settings).eval()
    with torch.no_grad():
        for name, parameter in bare_parameters(model).items():
            parameter.copy_(values.get(name, parameter))
    return held_out_loss(model, build_data(settings, ("held_out",)), settings.evaluation.sequences)


def _published(fragment: int, version: Version, epoch: int) -> Steps[FragmentVersion]:
    """Version 0 of a fragment, in the bucket before a commit names it."""
    state, weights = version
    output = FragmentVersion(fragment, 0, -1, epoch, digest(state), digest(weights))
    yield from write_surely(state_key(fragment, 0, epoch, output.state_digest), state)
    yield from write_surely(weights_key(fragment, 0, epoch, output.weights_digest), weights)
    return output


class FromTheStart(Evaluations):
    """First of all evaluates what the run was begun with, if whoever began it has not: a jump from there is found."""

    def begin(self, state: RunState) -> None:
        super().begin(state)
        brought = self.run.settings.model.brought is not None
        if brought and state.slot == 0 and not state.stability.good:
            self.last_slot = state.slot - evaluates_every(self.run)
