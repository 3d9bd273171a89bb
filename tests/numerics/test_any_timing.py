"""Whatever the timing: a payload is the gradient of the data that its offer claims, one learner that rebases is plain
training, and the log alone gives the same versions.

Steps, uploads and downloads take random times; offers come late and are folded into later ones, and some are on their
way while their fragment is adopted."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.keys import FORMAT_KEY, delta_key
from diloco_cli.protocol.log.records import Offer, OfferId, RunFormat, decode
from diloco_cli.store.memory import MemoryStore
from diloco_cli.syncer.arithmetic import state_spec
from diloco_cli.tasks.build import build_data, build_model
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.payload import from_bytes
from diloco_cli.training.inner import build_optimizer
from tests.numerics.harness import key_of_state, make_run, merges
from tests.numerics.test_identities import CONSTANT, DYADIC, inner_step
from tests.numerics.tiny import ROWS
from tests.numerics.virtual import run_virtual

pytestmark = pytest.mark.usefixtures("one_thread")
MIXINGS = pytest.mark.parametrize("mixing", ["replace", "rebase"])
SEEDS = (0,)
ANY_SEED = pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
STEP_S, UPLOAD_S, DOWNLOAD_S = (0.5, 1.5), (0.0, 2.0), (0.0, 2.0)  # a slot takes two steps
HICCUP_S, HICCUPS = 8.0, 0.1  # a share of the uploads takes so long


@cache
def lived(
    mixing: str, seed: int, learners: int = 3, rounds: int = 10, inner: InnerSettings = CONSTANT,
    model: str = "regression", data: str = "stream", codec: str = "fp32", error_feedback: bool = False,
) -> tuple[RunFormat, MemoryStore]:  # fmt: skip
    """A run of some rounds, and its bucket."""
    sync = SyncSettings(
        every=6, fragments=3, overlap=2, merge="avg", mixing=mixing,  # type: ignore[arg-type]
        error_feedback=error_feedback,
    )  # fmt: skip
    run = make_run(learners, rounds, sync, OuterSettings("sgd", 1.0, 0.0), inner, model, data, codec)
    run = replace(run, islands=tuple(replace(island, step_s=1.0) for island in run.islands))
    drawn = random.Random(f"{mixing} {seed}")
    return run, run_virtual(
        run,
        lambda name, number: drawn.uniform(*STEP_S),
        lambda name, number: HICCUP_S if drawn.random() < HICCUPS else drawn.uniform(*UPLOAD_S),
        lambda name, number: drawn.uniform(*DOWNLOAD_S),
    )


def offers(store: MemoryStore) -> dict[OfferId, Offer]:
    found = (decode(Offer, store.get(key) or b"", key) for key in store.list("offer/", limit=100_000))
    return {offer.id: offer for offer in found}


def applied(store: MemoryStore) -> set[OfferId]:
    return {(i.learner, i.incarnation, i.seq) for commit in merges(store) for i in commit.inputs}


# -- what a payload holds ---------------------------------------------------------------------------------------------


def moved(run: RunFormat, offer: Offer) -> torch.Tensor:
    """Old minus new of the offer's fragment by plain SGD on the data that it claims; the gradients are the data."""
    data, lr = build_data(run.settings), run.settings.train.inner.lr
    shard, shards = run.shard_of(offer.learner), len(run.islands)
    total = {"a": torch.zeros(3), "b": torch.zeros(2)}
    for position in range(offer.data_start, offer.data_end, ROWS):
        x, _ = data.batch(shard, shards, position, ROWS)
        total["a"] += lr * x[0, :3]
        total["b"] += lr * x[0, 3:5]
    return flatten(run.layout.fragments[offer.fragment], total)


@MIXINGS
@ANY_SEED
def test_every_payload_is_the_gradient_of_the_data_that_its_offer_claims(mixing: str, seed: int) -> None:
    """Applied or not: neither more nor less than one batch, which would be off by 1 / 64 at least."""
    run, store = lived(mixing, seed, inner=DYADIC, model="slope", data="dyadic_stream")
    assert LogVerifier(store, run).replay().ok
    checked = 0
    for offer in offers(store).values():
        payload = store.get(delta_key(*offer.id, offer.payload_digest))
        if payload:  # none where the log had passed the slot before it was encoded
            size = run.layout.fragments[offer.fragment].num_parameters
            values = torch.frombuffer(bytearray(payload[-4 * size :]), dtype=torch.float32)
            torch.testing.assert_close(values, moved(run, offer), rtol=0.0, atol=1e-5)
            checked += 1
    assert checked >= len(applied(store)) >= 24


@ANY_SEED
def test_what_a_missed_offer_held_is_in_no_merge_and_nothing_is_in_two(seed: int) -> None:
    """`rebase`: of each fragment every learner's data is merged in order; what came too late for its slot is given up
    when that slot's version is adopted, and never comes into a later offer."""
    _, store = lived("rebase", seed, inner=DYADIC, model="slope", data="dyadic_stream")
    merged, found = applied(store), offers(store)
    gaps = 0
    for name, fragment in sorted({(offer.learner, offer.fragment) for offer in found.values()}):
        mine = [offer for offer in found.values() if (offer.learner, offer.fragment) == (name, fragment)]
        ranges = sorted((offer.data_start, offer.data_end) for offer in mine if offer.id in merged)
        for (_, end), (start, _) in pairwise([(0, 0), *ranges]):
            assert end <= start
            gaps += start > end
    assert gaps > 0, "nothing was missed"


# -- one learner ------------------------------------------------------------------------------------------------------


@ANY_SEED
def test_one_learner_that_rebases_is_plain_training_whatever_the_timing(seed: int) -> None:
    """Every version is what plain training has after the data that its merge ends with."""
    run, store = lived("rebase", seed, learners=1, rounds=24)
    assert LogVerifier(store, run).replay().ok
    model = build_model(run.settings)
    optimizer, steps = build_optimizer(model, run.settings.train.inner), 0
    wanted = [(item.data_end // ROWS, c.outputs[0]) for c in merges(store) for item in c.inputs]
    assert len(wanted) >= 15
    for until, output in sorted(wanted, key=lambda pair: pair[0]):
        while steps < until:
            inner_step(run, model, optimizer, 0, steps)
            steps += 1
        fragment = run.layout.fragments[output.fragment]
        found = from_bytes(
            store.get(key_of_state(output)) or b"", state_spec(fragment.num_parameters, run.settings.outer.name)
        )["parameters"]
        torch.testing.assert_close(found, flatten(fragment, dict(model.named_parameters())), rtol=1e-5, atol=1e-6)


# -- what the log alone gives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixing", "codec", "error_feedback"),
    [("rebase", "int4", True), ("replace", "bf16", False)],
)
@ANY_SEED
def test_a_run_of_any_timing_is_computed_again_from_its_log_bit_for_bit(
    mixing: str, codec: str, error_feedback: bool, seed: int
) -> None:  # fmt: skip
    run, store = lived(mixing, seed, codec=codec, error_feedback=error_feedback)
    found = LogVerifier(store, run).replay()
    assert found.ok and found.merges >= 24


def test_the_same_timing_gives_the_same_bucket_to_the_byte() -> None:
    """Of learners, too: their steps, adoptions, rounding errors fed back, moments."""
    (_, first), (_, second) = (lived.__wrapped__("rebase", 0, codec="int4", error_feedback=True) for _ in range(2))
    names = set(first.list("", limit=100_000))
    assert names == set(second.list("", limit=100_000)) and len(names) > 100
    names.remove(FORMAT_KEY)  # it has the real date
    assert all(first.get(name) == second.get(name) for name in names)
