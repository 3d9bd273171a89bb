"""A signed toy fleet: each process holds the keys that it would be given, and no others."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.digests import digest
from diloco_cli.launch.plan_files import signed
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.signing import Keyring, Secret, learner_signer, syncer_signer
from tests.faulty_world import FaultyWorld
from tests.histories.learner import SimulatedLearner
from tests.simulation.toy import StartThreads, ToyFleet, make_run

SECRET = Secret("the run's own secret, 32 letters or more", "TEST")
HOST = syncer_signer("host")


def signed_run(run: RunFormat | None = None) -> RunFormat:
    return signed(run or make_run(merges=8), SECRET)


def private_key(*of: str) -> str:
    return digest("\0".join(of).encode()).rpartition("-")[2]


def key_for(run_id: str, signer: str, made: str = "first") -> str:
    """The text of a key of this signer's own, with its certificate."""
    return SECRET.certified(run_id, {signer: private_key(run_id, signer, made)})


def key_of(run_id: str, name: str, made: str = "first") -> str:
    return key_for(run_id, learner_signer(name), made)


def as_reader(run: RunFormat) -> RunFormat:
    """The run as a process without any key opens it."""
    assert run.signing is not None
    return replace(run, keyring=Keyring(run.run_id, run.signing.operator))


def as_signer(run: RunFormat, signer: str, made: str = "first") -> RunFormat:
    """The run as a process opens it that holds this one key."""
    return replace(run, keyring=Secret(key_for(run.run_id, signer, made), "TEST").keyring(run.run_id))


def as_fleet(run: RunFormat) -> RunFormat:
    """The run with the keys of its syncer and of all its learners, for processes that share one object."""
    signers = [HOST, *(learner_signer(island.name) for island in run.islands)]
    text = SECRET.certified(run.run_id, {signer: private_key(run.run_id, signer, "first") for signer in signers})
    return replace(run, keyring=Secret(text, "TEST").keyring(run.run_id))


def as_learner(run: RunFormat, name: str, made: str = "first") -> RunFormat:
    return as_signer(run, learner_signer(name), made)


def as_syncer(run: RunFormat, name: str = "host", made: str = "first") -> RunFormat:
    return as_signer(run, syncer_signer(name), made)


class SignedFleet(ToyFleet):
    """Learners and the syncer with their own keys; operators with their secret. `made`: which key a process of this
    name holds that starts now."""

    def __init__(self, run: RunFormat, world: FaultyWorld | None = None) -> None:
        self.made: dict[str, str] = {}
        super().__init__(run, world)

    def _learner(self, run: RunFormat, name: str, start_threads: StartThreads) -> SimulatedLearner:
        held = as_learner(run, name, self.made.get(name, "first"))
        return super()._learner(held, name, start_threads)

    def _syncers_run(self) -> RunFormat:
        return as_syncer(self.run, "host", self.made.get("syncer", "first"))
