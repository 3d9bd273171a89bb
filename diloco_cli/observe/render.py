"""Status as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_cli.observe.facts import UNKNOWN, moment
from diloco_cli.observe.status import TOOK_PART, LearnerStatus, MirrorStatus, Status
from diloco_cli.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from rich.text import Text

RECENT_LINES = 5
STYLES = (
    (("TRAINING", "UPLOADING", "SERVING", "MERGING", "STANDING_BY", "FINISHED", "DONE"), "green"),
    (("LOST", "FAILED", "STUCK", "SILENT", "STALLED"), "bold red"),
    (("STARTING", "SLOW", "DEGRADED", "PAUSED", "STOPPED", "DRAINING"), "yellow"),
    (("SUSPECT", "WAITING", "RECOVERING", "FENCED", "QUARANTINED"), "yellow"),
)


def escaped(text: str) -> str:
    """The text without control characters: text from the bucket must not control a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def headline(status: Status) -> str:
    """Two lines: the run's progress, and its rates."""
    done = 100 * status.tokens / status.tokens_target
    parts = [
        f"commit {status.commit}",
        f"tokens {format_count(status.tokens)} / {format_count(status.tokens_target)} ({min(done, 100):.1f}%)",
    ]
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    parts.append(f"as of {format_duration(status.age_s)} ago" if status.age_s is not None else "no heartbeat yet")
    return "   ".join(parts)


def pulse(status: Status) -> str:
    parts = [f"loss {status.loss:.3f}" if status.loss is not None else "loss not evaluated yet"]
    if status.tokens_per_s is not None:
        parts.append(f"{format_count(status.tokens_per_s)} tok/s merged")
    if status.goodput is not None:
        parts.append(f"goodput {100 * status.goodput:.1f}%")
    merge = status.last_merge
    if merge is not None:
        parts.append(
            f"last merge {format_duration(merge.age_s)} ago: {merge.participants} of {merge.alive}, "
            f"waited {merge.grace_used_s:.2f}s of {merge.grace_s:.2f}s grace"
        )
    return "   ".join(parts)


def verdict_lines(status: Status) -> list[str]:
    """Why the run is in its state, since when, and what helps; nothing where it is well."""
    if status.state == "MERGING":
        return []
    since = "" if status.since_s is None else f"since {format_duration(status.since_s)}: "
    return [f"{since}{escaped(status.reason)}", *([f"hint: {escaped(status.hint)}"] if status.hint else [])]


def mirror_line(mirror: MirrorStatus) -> str:
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
    return "  ".join([*words, *([escaped(mirror.last_error)] if mirror.last_error else [])])


COLUMNS = ("LEARNER", "STATE", "INC", "HEARD", "BEHIND", "STEP", "TOK/S", "IN LAST 10", "LOSS", "UP/DOWN", "NOTE")
LEFT = frozenset({"LEARNER", "STATE", "IN LAST 10", "NOTE"})


def status_text(status: Status) -> str:
    """The whole screen as plain text: two lines, a row per unit, whom the run trusts, and the newest notes."""
    rows = [COLUMNS, *(_learner_cells(learner) for learner in status.learners)]
    if status.syncer is not None:
        who = "" if status.syncer.unit == "syncer" else f" by {escaped(status.syncer.unit)}"
        note = f"epoch {status.syncer.epoch}{who}   {escaped(status.syncer.note)}"
        rows.append(("syncer", escaped(status.syncer.state), "", _age(status.syncer.heard_s), *[""] * 6, note))
    else:
        rows.append(("syncer", "-", "", "-", *[""] * 6, "not heard yet"))
    for standby in status.standbys:
        note = f"on {escaped(standby.host)}   {escaped(standby.note)}"
        name = "(syncer)" if standby.name == "syncer" else escaped(standby.name)  # its unit, which serves no more
        rows.append((name, escaped(standby.state), "", _age(standby.heard_s), *[""] * 6, note))
    lines = [f"run {status.run}   {status.state}   {headline(status)}", *verdict_lines(status), pulse(status)]
    lines += _aligned(rows)
    lines += [f"loss: {escaped(status.divergence)}"] if status.divergence else []
    lines += [mirror_line(mirror) for mirror in status.mirrors]
    lines += [status.trust] if status.trust else []
    if status.recent:
        lines.append("recent:")
        lines += [f"{_clock(e.time)}  {escaped(e.unit)}: {escaped(e.text)}" for e in status.recent[:RECENT_LINES]]
    return "\n".join(lines)


def status_view(status: Status) -> Text:
    """The same for a terminal: states in colour."""
    from rich.text import Text

    view = Text(status_text(status))
    view.highlight_words([status.run], "bold")
    view.highlight_words([" ".join(COLUMNS[:1]), "recent:"], "bold")
    for words, style in STYLES:
        view.highlight_regex(rf"\b({'|'.join(words)})\b", style)
    return view


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return [
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _learner_cells(learner: LearnerStatus) -> tuple[str, ...]:
    return (
        escaped(learner.name),
        escaped(learner.state),
        str(learner.incarnation),
        _age(learner.heard_s),
        str(learner.behind),
        str(learner.step),
        format_count(learner.tokens_per_s),
        learner.attendance.replace(TOOK_PART, "█").replace(".", "·"),
        f"{learner.loss:.2f}" if learner.loss is not None else "",
        f"{format_size(learner.up_bytes)}/{format_size(learner.down_bytes)}",
        escaped(learner.note),
    )


def plain_line(status: Status) -> str:
    """One line for logs and pipes."""
    learners = " ".join(f"{l.name}:{escaped(l.state.lower())}" for l in status.learners)  # noqa: E741
    trouble = f"  store: {escaped(status.store.retrying)}" if status.store and status.store.retrying else ""
    return f"{status.run} {status.state}  {headline(status)}  {pulse(status)}  {learners}{trouble}"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f}s"


def _clock(time: str) -> str:
    return "--:--:--" if moment(time) == UNKNOWN else moment(time).astimezone().strftime("%H:%M:%S")
