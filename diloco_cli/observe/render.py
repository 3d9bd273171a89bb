"""Status as text for people. First whether the run is well, what limits it, what failed and what to do; then its units,
and what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.escaping import escaped
from diloco_cli.observe.facts import UNKNOWN, moment
from diloco_cli.observe.garbage import GarbageStatus
from diloco_cli.observe.lines import STYLE_OF, StyledLine, flowing, plain, styled, wrapped
from diloco_cli.observe.status import MirrorStatus, Status, SyncerStatus
from diloco_cli.observe.unit_table import unit_table
from diloco_cli.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from rich.text import Text

RECENT_LINES = 5
MAX_ERRORS = 5
FINISHED = "FINISHED"
AFTERWARDS = ("export", "report", "verify")
OVER = (FINISHED, "STOPPED", "PAUSED", "FAILED")
"""States in which a screen that is watched ends: nothing happens any more until somebody does something."""


def status_text(status: Status, width: int | None = None) -> str:
    """The whole screen. Without a width nothing is shortened or wrapped."""
    return plain(status_lines(status, width))


def status_view(status: Status, width: int | None = None) -> Text:
    """The same for a terminal, in colour."""
    return styled(status_lines(status, width))


def status_lines(status: Status, width: int | None = None) -> list[StyledLine]:
    return [
        *head_lines(status, width),
        *unit_table(status, width),
        *rest_lines(status, width),
        *recent_lines(status, width, RECENT_LINES),
    ]


def head_lines(status: Status, width: int | None) -> list[StyledLine]:
    """What a person has to know: progress, the verdict and its cause, what limits the pace, what failed, the rates."""
    first, *others = flowing([f"run {escaped(status.run)}", status.state, *progress_parts(status)], width)
    lines = [StyledLine(first, "bold", status.state), *map(StyledLine, others)]
    style = STYLE_OF.get(status.state, "")
    lines += [StyledLine(text, style) for reason in reasons(status) for text in wrapped(reason, width)]
    for error in status.errors[:MAX_ERRORS]:
        told = f"{error.unit} failed at {clock(error.time)}: {error.text}".splitlines()
        lines += [StyledLine(text, "red") for line in told for text in wrapped(escaped(line), width)]
    if status.limit and status.limit != status.reason:
        lines += [StyledLine(text, "yellow") for text in wrapped(f"limit: {escaped(status.limit)}", width)]
    if status.state == FINISHED and status.store is not None:
        lines += [StyledLine(text, "bold") for text in flowing(next_commands(status.store.url), width, first="next: ")]
    elif status.hint:
        lines += [StyledLine(text, "bold") for text in wrapped(f"hint: {escaped(status.hint)}", width)]
    return [*lines, *map(StyledLine, flowing(pulse_parts(status), width))]


def reasons(status: Status) -> list[str]:
    """Why the run is in its state, and since when; nothing where it is well."""
    if status.state == "MERGING" or not status.reason:
        return []
    if status.since_s is None:
        return [escaped(status.reason)]
    age = format_duration(status.since_s)
    since = f"finished {age} ago" if status.state == FINISHED else f"for {age}"
    return [f"{since}: {escaped(status.reason)}"]


def next_commands(run: str) -> list[str]:
    """What one does with a run that is over."""
    return [f"diloco {command} {escaped(run)}" for command in AFTERWARDS]


def progress_parts(status: Status) -> list[str]:
    done = 100 * status.tokens / status.tokens_target
    parts = [
        f"commit {status.commit}" if status.commit >= 0 else "no commit yet",
        f"tokens {format_count(status.tokens)} / {format_count(status.tokens_target)} ({min(done, 100):.1f}%)",
    ]
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    return parts


def pulse_parts(status: Status) -> list[str]:
    parts = [_loss(status)]
    if status.tokens_per_s is not None:
        parts.append(f"{format_count(status.tokens_per_s)} tok/s merged")
    if status.goodput is not None:
        parts.append(f"goodput {100 * status.goodput:.1f}%")
    if status.participation is not None:
        parts.append(f"participation {100 * status.participation:.0f}%")
    parts.append(f"as of {format_duration(status.age_s)} ago" if status.age_s is not None else "no heartbeat yet")
    merge = status.last_merge
    if merge is not None:
        parts.append(
            f"last merge {format_duration(merge.age_s)} ago: {merge.participants} of {merge.alive}, "
            f"waited {merge.grace_used_s:.2f}s of {merge.grace_s:.2f}s grace"
        )
    return parts


def _loss(status: Status) -> str:
    if status.loss is not None:
        return f"loss {status.loss:.3f}"
    losses = [learner.loss for learner in status.learners if learner.loss is not None]
    trained = f": {sum(losses) / len(losses):.3f} in training" if losses else ""
    return f"loss not evaluated yet{trained}"


def rest_lines(status: Status, width: int | None) -> list[StyledLine]:
    """What else there is to know: a loss that jumped, garbage, the regions' buckets, whom the run trusts."""
    texts = [f"loss: {escaped(status.divergence)}"] if status.divergence and status.state != "PAUSED" else []
    if status.garbage is not None and status.garbage.note:
        texts.append(f"garbage: {status.garbage.note}")
    lines = [StyledLine(text, "yellow") for line in texts for text in wrapped(line, width)]
    lines += [StyledLine(text) for text in flowing(syncer_parts(status.syncer), width, "    ")]
    lines += [StyledLine(text) for text in wrapped(garbage_text(status.garbage), width) if text]
    for mirror in status.mirrors:
        style = "" if mirror.state == "FOLLOWS" else "yellow"
        lines += [StyledLine(text, style) for text in flowing(mirror_parts(mirror), width, "    ")]
    return lines + [StyledLine(text, "dim") for text in wrapped(status.trust, width) if text]


def garbage_text(garbage: GarbageStatus | None) -> str:
    """What waits to be deleted; "" if nothing does, or a warning says it."""
    if garbage is None or garbage.note:
        return ""
    if garbage.per_h is None:
        return f"garbage: how much waits to be deleted is not known yet, {garbage.objects:,} objects were found so far"
    waits = f"garbage: about {garbage.objects:,} objects wait to be deleted, {garbage.per_h:+,.0f} an hour"
    return waits if garbage.objects else ""


def syncer_parts(syncer: SyncerStatus | None) -> list[str]:
    """What limits the syncer, and the share of a slot that it needs; nothing while that is not measured."""
    if syncer is None or syncer.busy_percent is None or syncer.slot_s is None:
        return []
    parts = {"calls": syncer.calls_s, "bytes": syncer.bytes_s, "processor": syncer.processor_s}
    spent = ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items() if seconds is not None)
    share = f"the syncer needs {syncer.busy_percent:.0f}% of its slot of {format_duration(syncer.slot_s)}"
    return [f"{share}, most of it for {syncer.limit}", spent]


def mirror_parts(mirror: MirrorStatus) -> list[str]:
    """One region's own bucket: how far its log goes, the traffic, and errors."""
    words = [f"region {escaped(mirror.region)}", mirror.state.lower()]
    if mirror.commits_behind and mirror.state != "FOLLOWS":
        plural = "s" if mirror.commits_behind != 1 else ""
        late = f"{mirror.commits_behind} commit{plural} behind"
        words.append(f"{late} for {format_duration(mirror.behind_s)}" if mirror.behind_s >= 1 else late)
    words += [
        f"{mirror.offers} offers carried home",
        f"{format_size(mirror.up_bytes)} to it, {format_size(mirror.down_bytes)} from it",
        f"{mirror.requests:,} requests, {mirror.writes:,} of them writes",
    ]
    if mirror.egress_cost:
        words.append(f"egress costs {mirror.egress_cost:.4g}")
    if mirror.unheard:
        words.append(f"not heard: {escaped(', '.join(mirror.unheard))}")
    return [*words, escaped(mirror.last_error)]


def mirror_line(mirror: MirrorStatus) -> str:
    return flowing(mirror_parts(mirror), None)[0]


def recent_lines(status: Status, width: int | None, most: int) -> list[StyledLine]:
    """The newest events, the newest first."""
    if not status.recent or most < 2:
        return []
    told = [f"{clock(event.time)}  {escaped(event.unit)}: {escaped(event.text)}" for event in status.recent[:most]]
    return [
        StyledLine("recent:", "bold"),
        *(StyledLine(text) for line in told for text in wrapped(line, width, " " * 10)),
    ]


def plain_line(status: Status) -> str:
    """One line for logs and pipes."""
    learners = " ".join(f"{l.name}:{escaped(l.state.lower())}" for l in status.learners)  # noqa: E741
    trouble = [f"store: {escaped(status.store.retrying)}"] if status.store and status.store.retrying else []
    parts = [f"{status.run} {status.state}", *reasons(status), *progress_parts(status), *pulse_parts(status)]
    return flowing([*parts, learners, *trouble], None)[0]


def clock(time: str) -> str:
    return "--:--:--" if moment(time) == UNKNOWN else moment(time).astimezone().strftime("%H:%M:%S")


def date_and_clock(time: str) -> str:
    """For lists that go on for days."""
    return f"{'----------' if moment(time) == UNKNOWN else moment(time).astimezone().date()} {clock(time)}"
