"""`diloco verify --mirrors`: checks that every region's bucket holds the home log and no other bytes under its keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco_cli.digests import digest
from diloco_cli.errors import StoreError
from diloco_cli.protocol.log.commits import CollectionFloor, Commit
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    commit_key,
    max_fragment_bytes,
    offer_key,
    read_version_key,
)
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES, MergedOffer, RegionStore, RunFormat, decode
from diloco_cli.store.port import Store, all_keys

MOST_LISTED = 1000


@dataclass
class MirrorCheck:
    """The check of one region. `commits`: how many equal home's; `behind`: how many more home has; `unreachable`: why
    nothing could be compared. To be behind is no error; other bytes are: `mismatches` has the first MOST_LISTED,
    `unlisted` counts the others."""

    region: str
    url: str
    commits: int = 0
    behind: int = 0
    objects: int = 0
    mismatches: list[str] = field(default_factory=list)
    unreachable: str = ""
    unlisted: int = 0

    def differs(self, what: str) -> None:
        if len(self.mismatches) < MOST_LISTED:
            self.mismatches.append(what)
        else:
            self.unlisted += 1

    @property
    def ok(self) -> bool:
        return not self.mismatches and not self.unreachable


def check_mirror(run: RunFormat, region: RegionStore, home: Store, there: Store) -> MirrorCheck:
    """Compare FORMAT, every commit, every snapshot, every version and every offer that a merge used."""
    found = MirrorCheck(region.name, region.url)
    try:
        _same(found, home, there, FORMAT_KEY)
        _check_commits(found, run, home, there)
        for key in all_keys(there, "snapshot/"):
            if home.get(key, MAX_RECORD_BYTES) is not None:  # home may have collected it first
                _same(found, home, there, key)
        _check_versions(found, run, there)
    except StoreError as error:
        found.unreachable = str(error)
    return found


def _same(found: MirrorCheck, home: Store, there: Store, key: str) -> None:
    found.objects += 1
    if there.get(key, MAX_RECORD_BYTES) != home.get(key, MAX_RECORD_BYTES):
        found.differs(_other(key))


def _same_offer(found: MirrorCheck, run: RunFormat, home: Store, there: Store, item: MergedOffer) -> bool:
    """False if one of the two does not hold this offer."""
    key = offer_key(item.learner, item.incarnation, item.seq)
    found.objects += 1
    mine, theirs = (store.get(key, MAX_RECORD_BYTES) for store in (home, there))
    if mine != theirs:
        if mine is None or theirs is None:
            return False
        found.differs(_other(key))
    return True


def _other(key: str) -> str:
    return f"{key}: not what the home bucket holds"


def _check_commits(found: MirrorCheck, run: RunFormat, home: Store, there: Store) -> None:
    bound = {island.name for island in run.all_islands if island.region == found.region}
    lacking = list[tuple[int, str]]()
    while (data := home.get(commit_key(found.commits + found.behind), MAX_RECORD_BYTES)) is not None:
        key = commit_key(found.commits + found.behind)
        copy = None if found.behind else there.get(key, MAX_RECORD_BYTES)
        if copy is None:
            found.behind += 1
        else:
            found.commits += 1
            found.objects += 1
            if copy != data:
                found.differs(_other(key))
        commit = decode(Commit, data, key)
        if isinstance(commit, CollectionFloor):
            lacking = [(n, key) for n, key in lacking if n > commit.floor]  # each bucket collects what is behind it
        for item in commit.inputs:
            if item.learner in bound and not _same_offer(found, run, home, there, item):
                lacking.append((commit.n, offer_key(item.learner, item.incarnation, item.seq)))
    for _, key in lacking:
        found.differs(_other(key))
    for key in all_keys(there, "commit/", commit_key(found.commits - 1) if found.commits else ""):
        if home.get(key, MAX_RECORD_BYTES) != there.get(key, MAX_RECORD_BYTES):  # unless equal bytes have come by now
            found.differs(f"{key}: beyond what follows the home log")


def _check_versions(found: MirrorCheck, run: RunFormat, there: Store) -> None:
    for key in all_keys(there, "weights/"):
        version = read_version_key(key)
        max_bytes = max_fragment_bytes(run.layout, -1 if version is None else version[0])
        data = there.get(key, max_bytes)
        found.objects += 1
        if version is None or data is None or digest(data) != version[3]:
            found.differs(f"{key}: not the bytes that its name says")
