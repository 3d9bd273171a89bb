"""Everything that a stranger's offer may claim or bring is checked before arithmetic: each with its word in the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.protocol.actors.syncer import NoEvaluator, Syncer
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.health import REASONS
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, delta_key, incarnation_key, offer_key
from diloco_cli.protocol.log.records import Offer, RunFormat, create_signed, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.signing import learner_signer
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tensors.payload import to_bytes
from diloco_cli.virtual.world import World
from tests.numerics.harness import claim, make_run
from tests.numerics.tiny import ROWS
from tests.simulation.test_liveness import WRONG

SIZE = 5  # parameters of the model `slope`: a [3], b [2]
Tensors = dict[str, torch.Tensor]


def the_run(quorum: int = 1) -> RunFormat:
    """One fragment, two islands, the fp32 codec."""
    sync = SyncSettings(every=4, fragments=1, quorum=quorum)
    return make_run(2, 1000, sync, OuterSettings("sgd", 1.0, 0.0), InnerSettings(), "slope")


class RefusalBucket:
    """A syncer with the real arithmetic in a simulated world, and strangers who write what they like."""

    def __init__(self, run: RunFormat) -> None:
        self.run, self.world = run, World()
        self.world.store.create(FORMAT_KEY, encode(run))
        for name in ("l0", "l1"):
            key = incarnation_key(name, 1)
            self.world.store.create(key, run.keyring.sign(learner_signer(name), key, encode(claim())))
        syncer = Syncer(run, claim(), TorchArithmetic(run), NoEvaluator(), lambda: "2026-01-01T00:00:00Z", lambda: "n")
        self.world.start("syncer", syncer.serve())
        self.world.run(lambda: self.world.store.get(commit_key(0)) is not None, 10)

    def state(self) -> RunState:
        reader = self.world.start("reader", read_log(self.run))
        self.world.run(lambda: reader.ended, 5)
        assert isinstance(reader.result, RunState)
        return reader.result

    def sound(self, learner: str, seq: int, slot: int, tensors: Tensors) -> tuple[Offer, bytes]:
        """An honest offer on the newest version, and its payload."""
        base, payload = self.state().outputs[0], to_bytes(tensors)
        start = seq * 2 * ROWS
        offer = Offer(
            learner, 1, seq, slot, 0, base.version, base.weights_digest, start, start + 2 * ROWS, 2 * ROWS, 2,
            digest(payload), len(payload), "nonce",
        )  # fmt: skip
        return offer, payload

    def put(self, offer: Offer, payload: bytes | None) -> str:
        """Publish it under its own name and wait for what the log says of it."""
        if payload is not None:
            self.world.store.create(delta_key(*offer.id, offer.payload_digest), payload)
        key, signer = offer_key(*offer.id), learner_signer(offer.learner)
        mine = self.run.keyring.sign(signer, key, encode(offer))
        self.world.start("stranger", create_signed(self.run.keyring, signer, key, mine))
        assert self.world.run(lambda: bool(self.outcomes(offer)), 60), "it has no outcome"
        return self.outcomes(offer)[0]

    def outcomes(self, offer: Offer) -> list[str]:
        found = []
        for key in self.world.store.list("commit/"):
            commit = json.loads(self.world.store.get(key) or b"")
            settled = (*commit.get("inputs", []), *commit["outcomes"])
            mine = [item for item in settled if (item["learner"], item["seq"]) == offer.id[::2]]
            found += [item.get("reason", "applied") for item in mine]
        return found


def values(*numbers: float) -> Tensors:
    return {"values": torch.tensor(numbers or (1.0,) * SIZE)}


def test_the_offer_is_sound_before_it_is_changed() -> None:
    bucket = RefusalBucket(the_run())
    assert bucket.put(*bucket.sound("l1", 0, 0, values())) == "applied"


def with_norms(norms: list[float], numbers: Tensors) -> Tensors:
    return {"norms": torch.tensor(norms), **numbers}


PAYLOADS: list[tuple[str, Tensors | Callable[[bytes], bytes], str]] = [
    ("names", {"other": torch.ones(SIZE)}, "bad_payload"),
    ("shape", values(1, 1, 1, 1), "bad_payload"),
    ("rank", {"values": torch.ones(1, SIZE)}, "bad_payload"),
    ("dtype", {"values": torch.ones(SIZE, dtype=torch.int64)}, "bad_payload"),
    ("one tensor more", {**values(), "more": torch.ones(1)}, "bad_payload"),
    ("a header's byte", lambda data: data[:9] + b"X" + data[10:], "bad_payload"),
    ("a header's length", lambda data: (2**62).to_bytes(8, "little") + data[8:], "bad_payload"),
    ("cut short", lambda data: data[:-1], "bad_payload"),
    ("nothing", lambda data: b"", "late"),  # as of an offer whose learner knew that its slot was over
    ("not a number", values(0, float("nan"), 0, 0, 0), "non_finite"),
    ("infinite", values(0, 0, float("-inf"), 0, 0), "non_finite"),
    ("finite, but not its square", values(3e38, 3e38, 3e38, 3e38, 3e38), "non_finite"),
    ("a norm below zero", with_norms([-1.0, 1.0], values()), "bad_norms"),
    ("a norm that is not a number", with_norms([float("nan"), 1.0], values()), "non_finite"),
    ("norms of other values", with_norms([0.1, 0.1], values()), "bad_norms"),
]


@pytest.mark.parametrize(("tensors", "reason"), [case[1:] for case in PAYLOADS], ids=[case[0] for case in PAYLOADS])
def test_a_payload_that_is_not_what_it_must_be(tensors: Tensors | Callable[[bytes], bytes], reason: str) -> None:
    """Its offer names it rightly, size and digest too."""
    bucket = RefusalBucket(the_run())
    offer, payload = bucket.sound("l1", 0, 0, values() if callable(tensors) else tensors)
    payload = tensors(payload) if callable(tensors) else payload
    assert bucket.put(replace(offer, payload_digest=digest(payload), payload_bytes=len(payload)), payload) == reason


def test_other_bytes_of_the_same_size() -> None:
    bucket = RefusalBucket(the_run())
    offer, payload = bucket.sound("l1", 0, 0, values())
    assert bucket.put(offer, payload[:-1] + bytes([payload[-1] ^ 1])) == "digest_mismatch"


def test_a_norm_far_above_what_the_fragment_has_seen_is_clipped() -> None:
    bucket = RefusalBucket(the_run())
    for slot in range(4):
        assert bucket.put(*bucket.sound("l0", slot, slot, values())) == "applied"
    assert bucket.put(*bucket.sound("l1", 0, 4, values(*[100.0] * SIZE))) == "applied"
    merged = json.loads(bucket.world.store.get(commit_key(bucket.state().n)) or b"")
    assert merged["inputs"][0]["scale"] == pytest.approx(0.04) and "25 times as long as usual" in merged["reason"]


def test_a_base_that_was_used_and_data_that_was_merged() -> None:
    bucket = RefusalBucket(the_run())
    first, payload = bucket.sound("l1", 0, 0, values())
    assert bucket.put(first, payload) == "applied"
    again = replace(first, seq=1, slot=1, data_start=first.data_end, data_end=first.data_end + 2 * ROWS)
    assert bucket.put(again, payload) == "base_consumed"
    fresh, payload = bucket.sound("l1", 2, 1, values())
    overlapping = replace(fresh, data_start=ROWS, data_end=3 * ROWS)
    assert bucket.put(overlapping, payload) == "data_overlap"


def test_an_offer_whose_slot_has_been_merged() -> None:
    bucket = RefusalBucket(the_run())
    late = bucket.sound("l0", 0, 0, values())
    assert bucket.put(*bucket.sound("l1", 0, 0, values())) == "applied"
    assert bucket.put(*late) == "late"
    assert bucket.put(*bucket.sound("l0", 1, 1, values())) == "applied", "the next one is none the worse for it"


def test_steps_on_smaller_batches_are_no_false_claim() -> None:
    """Of an island a part of which is gone."""
    bucket = RefusalBucket(the_run())
    offer, payload = bucket.sound("l1", 0, 0, values())
    assert bucket.put(replace(offer, tokens=3, data_end=3), payload) == "applied"
    offer, payload = bucket.sound("l0", 0, 1, values())
    assert bucket.put(replace(offer, tokens=2 * ROWS + 1, data_end=2 * ROWS + 1), payload) == "bad_claim"


def test_every_word_of_the_log_has_its_test() -> None:
    """Those that only time, other offers or an operator give have tests of their own."""
    here = {reason for _, _, reason in PAYLOADS}
    here |= {"bad_claim", "digest_mismatch", "base_consumed", "data_overlap", "late"}
    elsewhere = {"unknown_learner", "old_incarnation", "settled", "quarantined", "before_rollback", "superseded"}
    elsewhere |= {"bad_signature", "key_revoked"}
    elsewhere |= {outcome for _, outcome in WRONG}  # tests/simulation/test_liveness.py
    assert here | elsewhere | {"run_over"} == set(REASONS)
