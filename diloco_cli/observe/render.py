"""Status as text for people."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from diloco_cli.observe.status import TOOK_PART, LearnerStatus, Status
from diloco_cli.units import format_count, format_duration, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

GOOD, BAD, CALM = "green", "red", "yellow"
STATE_STYLES = {
    **dict.fromkeys(("RUNNING", "TRAINING", "UPLOADING", "SERVING", "MERGING", "FINISHED", "DONE"), GOOD),
    **dict.fromkeys(("LOST", "FAILED", "SILENT"), BAD),
}


def escaped(text: str) -> str:
    """Without control characters: what strangers wrote must not steer a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def headline(status: Status) -> str:
    """Two lines: where the run is, and how it goes."""
    done = 100 * status.tokens / status.tokens_target
    parts = [
        f"commit {status.commit}",
        f"tokens {format_count(status.tokens)} / {format_count(status.tokens_target)} ({min(done, 100):.1f}%)",
    ]
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    parts.append(f"as of {format_duration(status.age_s)} ago")
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


def participation_bar(learner: LearnerStatus) -> str:
    return learner.last_10.replace(TOOK_PART, "█").replace(".", "·")


def status_view(status: Status) -> RenderableType:
    """The whole screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    state = (status.state, f"bold {STATE_STYLES.get(status.state, CALM)}")
    title = Text.assemble("run ", (status.run, "bold"), "   ", state, "   ", headline(status))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("LEARNER", "STATE"):
        table.add_column(name, no_wrap=True)
    for name in ("INC", "HEARD", "BEHIND", "STEP", "TOK/S"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("IN LAST 10", no_wrap=True, min_width=10)
    for name in ("LOSS", "UP/DOWN"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("NOTE", overflow="fold")
    for learner in status.learners:
        table.add_row(*_learner_cells(learner))
    if status.syncer is not None:
        heard = _age(status.syncer.heard_s)
        style = STATE_STYLES.get(status.syncer.state, CALM)
        note = f"epoch {status.syncer.epoch}   {escaped(status.reason)}"
        table.add_row("syncer", Text(status.syncer.state, style), "", heard, "", "", "", "", "", "", note)
    recent = [Text(f"{_clock(e.time)}  {e.unit}: {escaped(e.text)}", "dim") for e in status.recent[:5]]
    lines: list[RenderableType] = [title, Text(pulse(status)), table]
    if status.store is not None and status.store.retrying:
        lines.append(Text(f"store: {escaped(status.store.retrying)}", BAD))
    return Group(*lines, *([Text("recent:", "bold"), *recent] if recent else []))


def _learner_cells(learner: LearnerStatus) -> list[RenderableType]:
    from rich.text import Text

    return [
        escaped(learner.name),
        Text(learner.state, STATE_STYLES.get(learner.state, CALM)),
        str(learner.incarnation),
        _age(learner.heard_s),
        str(learner.behind),
        str(learner.step),
        format_count(learner.tokens_per_s),
        participation_bar(learner),
        f"{learner.loss:.2f}" if learner.loss is not None else "",
        f"{format_size(learner.up_bytes)}/{format_size(learner.down_bytes)}",
        escaped(learner.note),
    ]


def plain_line(status: Status) -> str:
    """One line for logs and pipes."""
    learners = " ".join(f"{l.name}:{l.state.lower()}" for l in status.learners)  # noqa: E741
    return f"{status.run} {status.state}  {headline(status)}  {pulse(status)}  {learners}"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f}s"


def _clock(time: str) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
