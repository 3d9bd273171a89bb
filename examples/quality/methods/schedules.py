"""The schedules that the methods of this family follow, as settings and as the paces of learners.

| method                | fragments | overlap | quorum | adoption                           | source               |
|-----------------------|-----------|---------|--------|------------------------------------|----------------------|
| synchronous DiLoCo    | 1         | 0       | M      | each round, everybody waits        | arXiv 2311.08105     |
| Streaming DiLoCo      | P         | tau     | M      | exactly tau slots after the slot   | arXiv 2501.18512     |
| Decoupled DiLoCo      | P         | tau     | K      | on arrival, nobody ever waits      | arXiv 2604.21428     |

A fleet decides with the product's own functions (see fleets.py); what differs between the methods are settings.
"""

from __future__ import annotations

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import SyncSettings
from diloco_cli.forecast.chips import MS, Constants, Timeline, equal_learners, generator
from diloco_cli.forecast.goodput import PUBLISHED

from .pacing import Pacing, Spell
from .walking import walk

LINK_STEPS = 0.3  # an upload, and a download, in inner steps: both fit well into the paper's overlap of two steps
SPREAD = 0.0002  # equal machines are not quite equal: learner i is so much slower than learner i - 1


def synchronous(sync: SyncSettings, learners: int) -> SyncSettings:
    """DiLoCo as first published: the whole model at once, everybody waits for everybody, plain mean."""
    return replace(
        sync,
        fragments=1,
        overlap=0,
        quorum=learners,
        merge="avg",
        local_steps="planned",
        clip="none",
    )


def streaming(sync: SyncSettings, learners: int) -> SyncSettings:
    """Streaming DiLoCo: fragments on their offsets, `sync.overlap` slots in flight, everybody in every merge."""
    return replace(
        sync,
        quorum=learners,
        merge="avg",
        local_steps="planned",
        clip="none",
    )


def decoupled(sync: SyncSettings) -> SyncSettings:
    """Decoupled DiLoCo: minimum quorum and grace window as `sync` says; nobody waits."""
    return sync


def lockstep(learners: int) -> tuple[Pacing, ...]:
    """Equal learners that wait for each merge, and links that take no time: time decides nothing."""
    return (Pacing(waits=True),) * learners


def nearly_equal(learners: int, step_s: float = 1.0) -> tuple[Pacing, ...]:
    """What machines of one kind are: equal but for `SPREAD`."""
    return tuple(_linked(step_s * (1 + SPREAD * index)) for index in range(learners))


def mixed_speeds(learners: int, slow: float) -> tuple[Pacing, ...]:
    """Two generations of hardware: every second learner takes `slow` times as long for a step."""
    return tuple(_linked(slow if index % 2 else 1.0 + SPREAD * index) for index in range(learners))


def failing(
    learners: int, chips: int, seed: int, horizon_steps: int, constants: Constants = PUBLISHED
) -> tuple[Pacing, ...]:
    """`chips` chips in equal learners, as the goodput simulator lets them fail: slices leave, the learner stops for the
    downscale, goes on with a smaller batch, stops again to take them back. Long enough for `horizon_steps` of each."""
    horizon_ms = round(2 * horizon_steps * constants.step_s * MS)
    fleet = equal_learners(chips, learners, constants)
    timelines = [walk(learner, horizon_ms, generator(seed, index)) for index, learner in enumerate(fleet)]
    return tuple(replace(_linked(constants.step_s), spells=spells_of(timeline)) for timeline in timelines)


def spells_of(timeline: Timeline) -> tuple[Spell, ...]:
    """The stretches of a simulated learner; between two of them that do not touch it does not step."""
    spells: list[Spell] = []
    last_end_ms = 0
    for start_ms, end_ms, active in zip(timeline.start_ms, timeline.end_ms, timeline.active, strict=True):
        if int(start_ms) > last_end_ms or not spells:
            spells.append(Spell(last_end_ms / MS, 0.0))
        spells.append(Spell(int(start_ms) / MS, int(active) / timeline.learner.slices))
        last_end_ms = int(end_ms)
    return tuple(spells)


def _linked(step_s: float) -> Pacing:
    return Pacing(step_s, LINK_STEPS * step_s, LINK_STEPS * step_s)
