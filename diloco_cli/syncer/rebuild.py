"""A damaged or lost committed state, computed anew from the version before it and the deltas that the log names."""

from __future__ import annotations

from diloco_cli.algorithm.payload import PayloadError
from diloco_cli.digests import digest
from diloco_cli.protocol.keys import commit_key, state_key
from diloco_cli.protocol.records import Commit, Output, RunFormat
from diloco_cli.protocol.wire import decode
from diloco_cli.store.port import Store
from diloco_cli.syncer.replay import Replayer


def rebuilt_state(run: RunFormat, store: Store, wanted: Output) -> bytes | None:
    """The bytes of `wanted`, bit-identical by their digest, from the newest intact version before it; None if the
    deltas do not give them. Reads the log from 0: for emergencies."""
    replayer = Replayer(store, run)
    commits = _commits_of(store, wanted)
    start, state = _newest_intact(replayer, commits, wanted)
    if state is None:
        return None
    for commit in commits[: start + 1]:
        replayer.books.settle(commit)
    for commit in commits[start + 1 :]:
        if not _restore(replayer, commits[start], wanted.fragment, state):
            return None
        merged = replayer.recompute(commit)
        if merged is None or digest(merged.state) != _output(commit, wanted.fragment).state_digest:
            return None
        replayer.books.settle(commit)
        start, state = start + 1, merged.state
    return state


def _commits_of(store: Store, wanted: Output) -> list[Commit]:
    """All that brought a version of this fragment, up to the wanted one."""
    found = []
    for n in range(wanted.version + 1):
        data = store.get(commit_key(n))
        commit = decode(Commit, data or b"", commit_key(n))
        if any(output.fragment == wanted.fragment for output in commit.outputs):
            found.append(commit)
    return found


def _newest_intact(replayer: Replayer, commits: list[Commit], wanted: Output) -> tuple[int, bytes | None]:
    """(index into `commits`, bytes); the very first version can always be built from the run's seed."""
    for index in reversed(range(len(commits))):
        output = _output(commits[index], wanted.fragment)
        data = replayer.store.get(state_key(output.fragment, output.version, output.epoch, output.state_digest))
        if data is not None and digest(data) == output.state_digest:
            return index, data
    first = replayer.arithmetic.initial()[wanted.fragment].state
    return 0, first if digest(first) == _output(commits[0], wanted.fragment).state_digest else None


def _restore(replayer: Replayer, commit: Commit, fragment: int, state: bytes) -> bool:
    try:
        replayer.arithmetic.restore(fragment, _output(commit, fragment).state_digest, state)
    except PayloadError:
        return False
    return True


def _output(commit: Commit, fragment: int) -> Output:
    return next(output for output in commit.outputs if output.fragment == fragment)
