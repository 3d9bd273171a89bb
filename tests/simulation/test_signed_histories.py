"""Some histories are of signed runs: each process writes with the keys that it was given, and checks all it reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_cli.errors import RefusedError
from diloco_cli.protocol.log import commits
from diloco_cli.signing import LOG, OPERATOR, Keyring, learner_signer
from tests.histories.campaign import lived
from tests.histories.history import History
from tests.histories.key_events import STOLEN_NONCE
from tests.histories.options import OF_KEYS, Options, drawn_options, run_of, with_key
from tests.histories.replayer import in_one

SEEDS = range(0, 30, 3)


def test_a_tenth_of_the_swarm_is_signed() -> None:
    assert 60 <= sum(drawn_options(seed).signed for seed in range(1000)) <= 140


def test_whatever_befalls_a_signed_run_breaks_nothing_and_every_record_is_signed() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        options = replace(drawn_options(seed), signed=True, forger=False)
        outcome = lived(seed, options, other_walls=seed == 0)
        assert outcome.violation is None, (seed, outcome.violation)
        keyring = run_of(options).keyring
        for key, data in outcome.objects.items():
            kind, _, rest = key.partition("/")
            signers = {"commit": LOG, "offer": learner_signer(rest.partition("/")[0]), "request": OPERATOR}
            signers["join"] = signers["offer"]
            if kind in signers:
                assert keyring.authenticates(signers[kind], key, data), key
                seen[kind] += 1
    assert seen.keys() == {"commit", "offer", "request", "join"}


def with_thieves(seed: int) -> Options:
    """A signed history in which keys are replaced and revoked, and a thief goes on with old ones."""
    options = drawn_options(seed)
    others = tuple(kind for kind in options.nemesis_events if kind not in OF_KEYS)
    return replace(options, signed=True, nemesis_events=(*others, *OF_KEYS))


UNHEARD_PREDECESSOR = 32  # a learner's next process has another key, and does not see its predecessor's claim yet


def test_what_a_process_with_a_new_key_offers_anew_because_listings_lag_is_merged_once() -> None:
    """It begins at data that its predecessor has offered already: the log refuses what overlaps (2)."""
    assert lived(UNHEARD_PREDECESSOR, with_thieves(UNHEARD_PREDECESSOR)).violation is None


UNLISTED = 91816  # certificates that listings show long after faults have ceased, or not before the run is over


def test_the_end_of_a_run_owes_no_outcome_to_offers_below_a_key_that_listings_do_not_show_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.histories.options.ENGINE_SHARE", 0.0)  # with an engine this seed is another story
    history = History(UNLISTED, drawn_options(UNLISTED))
    assert history.live().violation is None
    late = [key for key, at_s in history.bucket.listed_from_s.items() if at_s > history.monitor.last_commit_s]
    assert history.monitor.replayer.kinds[-1] == "finish"
    assert any(key.startswith("certificate/") for key in late)


def test_keys_are_replaced_and_revoked_and_what_a_thief_of_old_ones_writes_counts_for_nothing() -> None:
    seen: Counter[str] = Counter()
    for seed in range(14):
        outcome = lived(seed, with_thieves(seed))
        assert outcome.violation is None, (seed, outcome.violation)
        seen.update(in_one(data)["kind"] for data in outcome.log)
        seen.update(text.split()[1] for _, text, _ in outcome.tail if text.startswith("a thief wrote"))
        assert not any(STOLEN_NONCE.encode() in data for data in outcome.log)
    assert seen["revoke"] >= 12 and seen["thief"] >= 3


def any_key(*facts: object) -> None:
    """In place of commits.contradiction: whoever is certified may sign any commit."""
    return


@pytest.mark.parametrize(
    ("where", "name", "instead", "found"),
    [
        (commits, "contradiction", any_key, {"1", "keys", "exit", "6"}),
        (Keyring, "without", lambda self, revoked: self, {"2", "keys", "exit", "liveness", "4", "7"}),
    ],
    ids=["whose commit it is", "whose offer it is"],
)
def test_histories_catch_a_reader_that_does_not_ask(
    where: object, name: str, instead: object, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, instead)
    broken = (lived(seed, with_thieves(seed)).violation for seed in range(60))
    violation = next((violation for violation in broken if violation is not None), None)
    assert violation is not None and violation.invariant in found, violation


def test_a_learner_has_its_own_key_and_nobody_elses() -> None:
    run = with_key(run_of(replace(drawn_options(0), signed=True, learners=2)), learner_signer("l0"))
    assert run.keyring.holds(learner_signer("l0"))
    for other in (LOG, OPERATOR, learner_signer("l1")):
        with pytest.raises(RefusedError):
            run.keyring.sign(other, "offer/l1/00000001/0000000000.json", b'{"a":1}')
