"""Runs in the situations that a person meets, as the facts that `status` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp

from diloco_cli.events.event import Event
from diloco_cli.observe.screen import Curves
from diloco_cli.observe.status import (
    LastMerge,
    LearnerStatus,
    MirrorStatus,
    StandbyStatus,
    Status,
    StoreStatus,
    SyncerStatus,
    UnitError,
)
from diloco_cli.protocol.log.metrics import Metrics

URL = "gs://north-sea/runs/nano-1b"
IOWA = LearnerStatus(
    "iowa", "us-central1", "TRAINING", 1, 3.2, 0, 41_200, 9_640_000_000, 465_060.0, 10, "##########", 2.912,
    142_000_000_000, 140_000_000_000, "", 0.3, 1.0, 0.5, 0.45, 0.45,
)  # fmt: skip
RHINE = replace(
    IOWA, name="rhine", region="europe-west4", state="UPLOADING", step=39_870, tokens=9_100_000_000,
    tokens_per_s=172_400.0, in_last_10=9, attendance="####.#####", up_bytes=97_000_000_000, heard_s=1.1,
)  # fmt: skip
HOME = replace(
    IOWA, name="home-office-workstation", region="us-central1", state="SUSPECT", incarnation=4, heard_s=12.0,
    behind=3, step=13_100, tokens=2_860_000_000, tokens_per_s=19_000.0, in_last_10=1, attendance="....#.....",
    loss=2.96, up_bytes=28_000_000_000, down_bytes=90_000_000_000, note="link 3x too slow for its round of 150 s",
)  # fmt: skip
RECENT = [
    Event("2026-11-24T10:41:00Z", "refused", "home-office-workstation", "7 offers too late in 2 min"),
    Event("2026-11-24T10:23:01Z", "restarted", "rhine", "started again by its supervisor, 61 s after it was killed"),
    Event("2026-11-24T10:22:00Z", "chaos", "rhine", "killed by chaos (seed 7, fault 14)"),
]
HEALTHY = Status(
    run="nano-1b",
    plan="",
    state="MERGING",
    commit=412,
    step=41_200,
    tokens=21_600_000_000,
    tokens_target=100_000_000_000,
    loss=2.9134,
    tokens_per_s=664_000.0,
    goodput=0.961,
    participation=0.93,
    eta_s=273_600.0,
    age_s=1.1,
    reason="waits for 1 more offer of 3",
    last_merge=LastMerge(38.0, 3, 3, 2, 0.41, 0.9),
    learners=[IOWA, RHINE, HOME],
    syncer=SyncerStatus("SERVING", 3, "box-7", 1.4, "syncer", "waits for 1 more offer of 3", None, None, None),
    store=StoreStatus(URL, 267_000_000_000, 370_000_000_000, 912_000, 201_000, 2213.6, "", 0.0),
    recent=RECENT,
    trust="not signed: whoever may write into the bucket is trusted",
    clock_skew_s=None,
    standbys=[],
    mirrors=[],
    partial="",
    divergence="",
    since_s=None,
    hint="",
    limit="",
    errors=[],
    garbage=None,
    doubts="",
    jobs=[],
)
EU = MirrorStatus(
    "europe-west4", "gs://rhine/nano-1b", "FOLLOWS", 412, 0, 0.0, 401, 97_000_000_000, 64_000_000_000, 11.52, "",
    88_000, 21_000, {},
)  # fmt: skip


def starting() -> Status:
    fresh = {"step": 0, "tokens": 0, "tokens_per_s": 0.0, "in_last_10": 0, "attendance": "", "loss": None, "behind": 0,
             "up_bytes": 0, "down_bytes": 0, "note": "", "incarnation": 1}  # fmt: skip
    learners = [replace(each, state="STARTING", heard_s=None, **fresh) for each in HEALTHY.learners]
    learners[0] = replace(learners[0], heard_s=0.8, state="TRAINING", step=7, tokens_per_s=401_000.0)
    return replace(
        HEALTHY, state="STARTING", reason="not heard yet: rhine, home-office-workstation", commit=0, step=0, tokens=0,
        loss=None, tokens_per_s=None, goodput=0.0, participation=None, eta_s=None, age_s=0.8, last_merge=None,
        learners=learners, syncer=replace(HEALTHY.syncer, epoch=1, note="no offer yet") if HEALTHY.syncer else None,
        recent=[],
    )  # fmt: skip


def slow() -> Status:
    return replace(
        HEALTHY, state="SLOW", reason="merges go on at 0.61 of the best pace", since_s=840.0, tokens_per_s=405_000.0,
        limit="home-office-workstation's upload: 28 of 30 Mbps are used, and it needs 84",
        hint="diloco plan inventory.yaml -f run.yaml",
    )  # fmt: skip


def stalled() -> Status:
    reason = "the syncer's store fails: create commit/413: 403 Forbidden: storage.objects.create is not allowed"
    return replace(
        HEALTHY, state="STALLED", reason=reason, since_s=262.0, limit=reason, hint=f"diloco doctor {URL}",
        eta_s=None,
        learners=[replace(IOWA, state="WAITING", behind=0, note="a round ahead of the merges"), RHINE, HOME],
        last_merge=LastMerge(262.0, 3, 3, 2, 0.41, 0.9),
        standbys=[StandbyStatus("standby-rhine", "STANDING_BY", "rhine-4", 0.7, "the syncer is heard")],
        errors=[UnitError("syncer", "2026-11-24T10:45:12Z", "403 Forbidden: storage.objects.create is not allowed")],
    )  # fmt: skip


def degraded() -> Status:
    kept_out = "its offers are refused since commit 388: diloco readmit"
    bug = 'RuntimeError: shape mismatch: [8, 1024] and [8, 1023]\n  File "my_data.py", line 41, in batch\x1b[31m'
    return replace(
        HEALTHY, state="DEGRADED", since_s=1900.0,
        reason="merges go on without 2 of 3 planned islands: rhine (it has failed), home-office-workstation (its "
        "offers are refused since commit 388)",
        hint=f"diloco logs rhine --run {URL}",
        learners=[IOWA, replace(RHINE, state="FAILED", heard_s=1900.0),
                  replace(HOME, state="QUARANTINED", note=kept_out)],
        errors=[UnitError("rhine", "2026-11-24T10:13:20Z", bug)],
        divergence="the loss was 3.41 at commit 402, above 2.95",
    )  # fmt: skip


def mirrors() -> Status:
    late = replace(
        EU, region="asia-northeast1", url="gs://kyoto/nano-1b", state="BEHIND", commit=398, commits_behind=14,
        behind_s=84.0, last_error="create fails for 84 s: 503 Service Unavailable",
        unheard={"home-office-workstation": "offer/home-office-workstation/1/3: other bytes; start it again"},
    )  # fmt: skip
    return replace(HEALTHY, mirrors=[EU, late])


def finished() -> Status:
    learners = [replace(each, state="DONE", note="") for each in HEALTHY.learners]
    return replace(
        HEALTHY, state="FINISHED", reason="the target is reached", since_s=300.0, hint=f"diloco export {URL}",
        commit=1914, tokens=100_000_000_000, loss=2.4417, eta_s=None, age_s=300.0, learners=learners,
        syncer=replace(HEALTHY.syncer, state="DONE", note="") if HEALTHY.syncer else None,
    )  # fmt: skip


def many() -> Status:
    """Sixty-four learners, of which some are not well."""
    states = {7: "LOST", 21: "SUSPECT", 60: "FAILED"}
    learners = [replace(IOWA, name=f"node-{n:02}", state=states.get(n, "TRAINING")) for n in range(64)]
    return replace(HEALTHY, learners=learners)


SITUATIONS: dict[str, Callable[[], Status]] = {
    "starting": starting, "healthy": lambda: HEALTHY, "slow": slow, "stalled": stalled, "degraded": degraded,
    "mirrors": mirrors, "finished": finished,
}  # fmt: skip


def curves(num_losses: int = 60) -> Curves:
    found = Curves()
    tokens = [360_000_000 * n for n in range(num_losses)]
    found.add(Metrics(losses=tuple((t, 2.9 + 2.7 * exp(-n / 9)) for n, t in enumerate(tokens))))
    found.rates = [(float(t), 664_000.0 - 90_000 * (n % 9 == 4)) for n, t in enumerate(tokens)]
    return found
