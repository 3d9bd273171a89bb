"""Some histories are of signed runs: each process writes with the keys that it was given, and checks all it reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from diloco_cli.errors import RefusedError
from diloco_cli.histories.campaign import lived
from diloco_cli.histories.options import drawn_options, run_of, with_key
from diloco_cli.signing import LOG, OPERATOR, learner_signer

SEEDS = range(0, 60, 3)


def test_a_tenth_of_the_swarm_is_signed() -> None:
    assert 60 <= sum(drawn_options(seed).signed for seed in range(1000)) <= 140


def test_whatever_befalls_a_signed_run_breaks_nothing_and_every_record_is_signed() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        options = replace(drawn_options(seed), signed=True)
        outcome = lived(seed, options, other_walls=seed == 0)
        assert outcome.violation is None, (seed, outcome.violation)
        keyring = run_of(options).keyring
        for key, data in outcome.objects.items():
            kind, _, rest = key.partition("/")
            signers = {"commit": LOG, "offer": learner_signer(rest.partition("/")[0]), "request": OPERATOR}
            if kind in signers and b'"kind":"join"' not in data:
                assert keyring.authenticates(signers[kind], key, data), key
                seen[kind] += 1
    assert seen.keys() == {"commit", "offer", "request"}


def test_a_learner_has_its_own_key_and_nobody_elses() -> None:
    run = with_key(run_of(replace(drawn_options(0), signed=True, learners=2)), learner_signer("l0"))
    assert run.keyring.holds(learner_signer("l0"))
    for other in (LOG, OPERATOR, learner_signer("l1")):
        with pytest.raises(RefusedError):
            run.keyring.sign(other, "offer/l1/00000001/0000000000.json", b'{"a":1}')
