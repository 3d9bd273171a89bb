"""A signed toy fleet: each process holds the keys that it would be given, and no others."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.histories.learner import SimulatedLearner
from diloco_cli.launch.new_run import signed
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.signing import Keyring, Secret, learner_signer
from tests.simulation.toy import StartThreads, ToyFleet, make_run

SECRET = Secret("the run's own secret, 32 letters or more", "TEST")


def signed_run(run: RunFormat | None = None) -> RunFormat:
    return signed(run or make_run(merges=8), SECRET)


def key_of(run_id: str, name: str) -> str:
    return SECRET.certified(run_id, [learner_signer(name)])


def as_reader(run: RunFormat) -> RunFormat:
    """The run as a process without any key opens it."""
    assert run.signing is not None
    return replace(run, keyring=Keyring(run.run_id, run.signing.operator))


def as_learner(run: RunFormat, name: str) -> RunFormat:
    """The run as that learner's process opens it: with its own key alone."""
    own = Secret(key_of(run.run_id, name), "TEST")
    return replace(run, keyring=own.keyring(run.run_id))


class SignedFleet(ToyFleet):
    """Learners with their own keys; the syncer and the operators with the run's secret."""

    def _learner(self, run: RunFormat, name: str, start_threads: StartThreads) -> SimulatedLearner:
        return super()._learner(as_learner(run, name), name, start_threads)
