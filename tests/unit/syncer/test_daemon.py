"""Commit 0 by whoever creates the run: with exactly these values, once, and never with others."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.clock import utc_now_text
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.errors import RefusedError
from diloco_cli.observe.replay import verified
from diloco_cli.protocol.actors.syncer import Evaluations, NoEvaluator, Syncer
from diloco_cli.protocol.log.commit_log import no_pulse
from diloco_cli.protocol.log.heartbeats import SyncerHeartbeat
from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key
from diloco_cli.protocol.log.records import RunFormat, decode
from diloco_cli.protocol.log.state import RunState, SyncerState
from diloco_cli.randomness import nonce
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.syncer.daemon import _say_goodbye, begin, first_loss, first_versions
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tasks.weights import Values
from diloco_cli.tensors.flat import bare_parameters
from tests.numerics.harness import CLOCK, claim, commits, make_run, outer_parameters, run_to_end


@pytest.fixture
def run() -> RunFormat:
    """Its model is a regression, whose values are brought."""
    made = make_run(2, 6, SyncSettings(every=4, fragments=2), OuterSettings(), InnerSettings(lr=1e-2, warmup_steps=2))
    return replace(made, settings=replace(made.settings, model=replace(made.settings.model, initial="a.safetensors")))


def values_of(run: RunFormat, shift: float = 0.5) -> Values:
    return {name: p.detach() + shift for name, p in bare_parameters(build_model(run.settings)).items()}


def begun(run: RunFormat, store: Store, values: Values, loss: float | None = None) -> RunState:
    return perform(begin(run, first_versions(run, values), claim(), utc_now_text, nonce, lambda: loss), store, CLOCK)


def test_the_first_commit_has_these_values_and_the_next_their_loss(run: RunFormat) -> None:
    store, values = MemoryStore(), values_of(run)
    state = begun(run, store, values, loss=2.5)
    found = outer_parameters(run, store)
    assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in found)
    assert (state.n, state.epoch, state.stability.good[0].loss, state.stability.good[0].n) == (1, 1, 2.5, 0)
    assert [commit.kind for commit in commits(store)] == ["epoch_start", "eval"]


def test_a_log_that_has_begun_stays_as_it_is(run: RunFormat) -> None:
    store = MemoryStore()
    before = begun(run, store, values_of(run))
    assert begun(run, store, values_of(run, shift=9.0), loss=1.0) == before


def test_of_two_that_begin_at_once_one_begins(run: RunFormat) -> None:
    store, values = MemoryStore(), values_of(run)

    def overtaken():
        begun(run, store, values)
        yield from first_versions(run, values_of(run, shift=9.0))

    slower = perform(begin(run, overtaken(), claim(), utc_now_text, nonce, lambda: 1.0), store, CLOCK)
    assert (slower.n, slower.epoch) == (0, 2)
    assert all(torch.equal(value, values[name]) for name, value in outer_parameters(run, store).items())


def test_a_run_goes_on_from_there_and_no_syncer_begins_it_with_values_of_its_own(run: RunFormat) -> None:
    with pytest.raises(RefusedError, match=r"values of a\.safetensors, which are not here"):
        TorchArithmetic(run).initial()
    store, values = MemoryStore(), values_of(run, shift=3.0)
    begun(run, store, values)
    _, after = run_to_end(run, store)
    kinds = [commit.kind for commit in commits(store)]
    assert kinds[:2] == ["epoch_start", "epoch_start"] and kinds[-1] == "finish"
    assert first_loss(run.settings, after) < first_loss(run.settings, values)
    assert verified(store, run).ok


def test_the_first_loss_is_that_of_the_values(run: RunFormat) -> None:
    values = values_of(run)
    model = build_model(run.settings)
    model.load_state_dict(dict(values), strict=False)
    (batch,) = list(build_data(run.settings).held_out(run.settings.evaluation.sequences))[:1]
    assert first_loss(run.settings, values) == pytest.approx(model(*batch).item())
    assert first_loss(run.settings, values) != pytest.approx(first_loss(run.settings, values_of(run, shift=0.0)))


def test_a_syncer_evaluates_first_what_nobody_has(run: RunFormat) -> None:
    own = replace(run, settings=replace(run.settings, model=replace(run.settings.model, initial=None)))
    state, evaluated = begun(run, MemoryStore(), values_of(run)), begun(run, MemoryStore(), values_of(run), loss=1.0)
    for of, at, at_once in ((run, state, True), (run, evaluated, False), (own, state, False)):
        evaluations = Evaluations(of, NoEvaluator())
        evaluations.begin(at)
        perform(evaluations.due(at, 1, no_pulse), MemoryStore(), CLOCK)
        assert (evaluations.evaluator.result() is not None) == at_once


def test_a_syncer_that_is_told_to_leave_says_why(run: RunFormat) -> None:
    store = MemoryStore()
    syncer = Syncer(run, claim(), TorchArithmetic(run), NoEvaluator(), utc_now_text, nonce)
    syncer.doing, syncer.epoch, syncer.reason = SyncerState.SERVING, 1, "2 of 2"
    _say_goodbye(syncer, store, "told to leave by SIGTERM")
    last = decode(SyncerHeartbeat, store.get(heartbeat_key(SYNCER)) or b"", "heartbeat")
    assert (last.state, last.reason) == ("DONE", "told to leave by SIGTERM")
