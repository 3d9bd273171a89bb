"""A damaged or lost committed state, computed anew from the version before it and the deltas that the log names."""

from __future__ import annotations

from itertools import pairwise

from diloco_cli.digests import digest
from diloco_cli.observe.replay import LogVerifier
from diloco_cli.protocol.log.commits import Commit, Merge, Rollback
from diloco_cli.protocol.log.keys import commit_key, max_fragment_bytes, state_key
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode
from diloco_cli.store.port import Store
from diloco_cli.tensors.payload import PayloadError


def rebuilt_state(run: RunFormat, store: Store, wanted: FragmentVersion) -> bytes | None:
    """The bytes of `wanted`, bit-identical by their digest, from the newest intact version before it; None if the
    deltas do not give them, or are not kept any more. Reads the log from commit 0, so only for emergencies."""
    replayer = LogVerifier(store, run)
    commits = _commits_of(store, wanted)
    origins = _origins(commits)
    start, state = _newest_intact(replayer, [commits[index] for index in origins], wanted)
    if state is None:
        return None
    settled = 0
    for before, index in pairwise(origins[start:]):
        commit = commits[index]
        while settled < index:
            replayer.books.settle(commits[settled])
            settled += 1
        if isinstance(commit, Merge):
            if not _restore(replayer, commits[before], wanted.fragment, state):
                return None
            merged = replayer.recompute(commit)
            state = merged.state if merged is not None else b""
        if digest(state) != _output(commit, wanted.fragment).state_digest:
            return None
    return state


def _origins(commits: list[Commit]) -> list[int]:
    """Indices of the commits that led to the last one, itself included: a rollback follows from its target."""
    found = [len(commits) - 1]
    while found[-1] > 0:
        commit, before = commits[found[-1]], found[-1] - 1
        while isinstance(commit, Rollback) and before > 0 and commits[before].n > commit.to:
            before -= 1
        found.append(before)
    return found[::-1]


def _commits_of(store: Store, wanted: FragmentVersion) -> list[Commit]:
    """All commits that brought a version of this fragment, up to the wanted one."""
    found = []
    for n in range(wanted.version + 1):
        data = store.get(commit_key(n), MAX_RECORD_BYTES)
        commit = decode(Commit, data or b"", commit_key(n))
        if any(output.fragment == wanted.fragment for output in commit.outputs):
            found.append(commit)
    return found


def _newest_intact(replayer: LogVerifier, commits: list[Commit], wanted: FragmentVersion) -> tuple[int, bytes | None]:
    """(index into `commits`, bytes); the very first version can always be built from the run's seed."""
    for index in reversed(range(len(commits))):
        output = _output(commits[index], wanted.fragment)
        key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
        data = replayer.store.get(key, max_fragment_bytes(replayer.run.layout, output.fragment))
        if data is not None and digest(data) == output.state_digest:
            return index, data
    first = replayer.arithmetic.initial()[wanted.fragment].state
    return 0, first if digest(first) == _output(commits[0], wanted.fragment).state_digest else None


def _restore(replayer: LogVerifier, commit: Commit, fragment: int, state: bytes) -> bool:
    try:
        replayer.arithmetic.restore(fragment, _output(commit, fragment).state_digest, state)
    except PayloadError:
        return False
    return True


def _output(commit: Commit, fragment: int) -> FragmentVersion:
    return next(output for output in commit.outputs if output.fragment == fragment)
