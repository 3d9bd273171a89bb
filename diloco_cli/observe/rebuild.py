"""A damaged or lost committed state, computed anew from the version before it and the deltas that the log names."""

from __future__ import annotations

from itertools import islice, pairwise

from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, RefusedError
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
            replayer.checker.settle(commits[settled])
            settled += 1
        if isinstance(commit, Merge):
            if not _restore(replayer, commits[before], wanted.fragment, state):
                return None
            merged = replayer.recompute(commit)
            state = merged.state if merged is not None else b""
        if digest(state) != _output(commit, wanted.fragment).state_digest:
            return None
    return state


def lost(run: RunFormat, store: Store, wanted: FragmentVersion) -> DataCheckError:
    """The error where a state cannot be made anew, with the way out: to the newest whole commit."""
    n = newest_whole(run, store)
    key = state_key(wanted.fragment, wanted.version, wanted.epoch, wanted.state_digest)
    return DataCheckError(
        f"the committed state of fragment {wanted.fragment} is lost or damaged, and the log does not give it anew",
        where=key,
        hint="no earlier commit is whole: restore that object from a copy of the bucket"
        if n is None
        else f"go back to the newest commit that is whole: diloco rollback {run.name} --to {n}; then: diloco resume"
        f" {run.name}",
    )


def newest_whole(run: RunFormat, store: Store) -> int | None:
    """The newest commit that a rollback can go to: all states as of it are in the bucket, with the right bytes."""
    outputs: list[FragmentVersion] = []
    n, floor = 0, LogVerifier(store, run).floor()
    while (data := store.get(commit_key(n), MAX_RECORD_BYTES)) is not None:
        outputs += decode(Commit, data, commit_key(n)).outputs
        n += 1
    whole: dict[FragmentVersion, bool] = {}
    at = n - 1
    while at >= floor:
        newest = {output.fragment: output for output in outputs if output.version <= at}
        if len(newest) < run.num_fragments:
            return None
        for output in newest.values():
            whole[output] = whole[output] if output in whole else _bytes_of(run, store, output) is not None
        damaged = [output.version for output in newest.values() if not whole[output]]
        if not damaged:
            return at
        at = min(damaged) - 1
    return None


def _bytes_of(run: RunFormat, store: Store, output: FragmentVersion) -> bytes | None:
    """The state's bytes in the bucket, if they are those of its digest."""
    key = state_key(output.fragment, output.version, output.epoch, output.state_digest)
    data = store.get(key, max_fragment_bytes(run.layout, output.fragment))
    return data if data is not None and digest(data) == output.state_digest else None


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
    """(index into `commits`, bytes); the very first version can be made from the seed, where its code may run."""
    for index in reversed(range(len(commits))):
        data = _bytes_of(replayer.run, replayer.store, _output(commits[index], wanted.fragment))
        if data is not None:
            return index, data
    try:
        first = next(islice(replayer.arithmetic.initial(), wanted.fragment, None)).state
    except RefusedError:  # a syncer that may not run the model's code
        return 0, None
    return 0, first if digest(first) == _output(commits[0], wanted.fragment).state_digest else None


def _restore(replayer: LogVerifier, commit: Commit, fragment: int, state: bytes) -> bool:
    try:
        replayer.arithmetic.restore(fragment, _output(commit, fragment).state_digest, state)
    except PayloadError:
        return False
    return True


def _output(commit: Commit, fragment: int) -> FragmentVersion:
    return next(output for output in commit.outputs if output.fragment == fragment)
