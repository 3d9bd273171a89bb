"""What operators' commands share: ask the syncer and wait for its answer; with no syncer alive, answer here."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli import __version__
from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import OpenRun, head_of, open_run
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.errors import FencedError, RefusedError, TryAgainError, UsageError
from diloco_cli.randomness import nonce

if TYPE_CHECKING:
    from diloco_cli.protocol.log.records import RequestKind
    from diloco_cli.protocol.log.state import RunState

SYNCER_ANSWERS_S = 10.0
LOOK_EVERY_S = 0.1
REGIONS_WITHIN_S = 10.0
TimeoutOption = typer.Option(
    None,
    "--timeout",
    metavar="S",
    help="Seconds of the syncer's silence before this command answers.  [default: 10, or twice its longest so far]",
)
ANSWERED_BY: dict[RequestKind, str] = {"rollback": "rollback", "gc": "gc_floor", "readmit": "readmit"}
YesOption = typer.Option(False, "-y", "--yes", help="Do not ask.")
DryRunOption = typer.Option(False, "-n", "--dry-run", help="Only say what would be done.")
JsonOption = typer.Option(False, "--json", help="One JSON object.")


def open_unfinished(run: str | None, what: str) -> tuple[OpenRun, RunState]:
    """The run and the head of its log. A run that is FINISHED, or has no version yet, is not operated on."""
    opened = open_run(run)
    state = head_of(opened)
    _refuse_finished(opened, state, what)
    return opened, state


def _refuse_finished(opened: OpenRun, state: RunState, what: str) -> None:
    if state.phase == "FINISHED":
        hint = f"its parameters: diloco export {opened.name}"
        raise UsageError(f"run {opened.name} is FINISHED: {what} is for runs that go on", hint=hint)
    if state.n < 0:
        raise TryAgainError(f"run {opened.name} has no commit yet", hint=f"diloco status {opened.name}")


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; elsewhere only --yes will do. Raises RefusedError (exit 8) for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise RefusedError("this cannot be taken back, and nobody is there to ask", hint="say so beforehand: --yes")
    if not typer.confirm(question, default=False, err=True):
        raise RefusedError("nothing was changed")


def carry_out(
    opened: OpenRun, kind: RequestKind, timeout_s: float | None, reason: str = "", *, learner: str | None = None,
    to: int | None = None,
) -> RunState:  # fmt: skip
    """The head of the log after the answer. Raises UsageError with the log's text if it was a refusal."""
    from diloco_cli.protocol.actors.requests import ask

    before = head_of(opened)
    asked = ask(before, kind, nonce(), utc_now_text(), reason, learner=learner, to=to, keyring=opened.format.keyring)
    number = opened.perform(asked)
    state = answered(opened, before, number, timeout_s)
    if state.next_request <= number:
        talk("no syncer answers: doing it from here")
        state = answer_here(opened)
    if state.next_request <= number:
        _refuse_finished(opened, state, "this")
        raise TryAgainError("the request waits for the next syncer", hint=f"diloco resume {opened.name}")
    refused = _refusal_of(opened, range(before.n + 1, state.n + 1), number, ANSWERED_BY[kind])
    if refused is not None:
        raise UsageError(refused, where=opened.name)
    return state


def answered(opened: OpenRun, state: RunState, number: int, timeout_s: float | None) -> RunState:
    """Wait as long as a syncer lives: its heartbeat changes every few seconds, also while it copies a large model."""
    from diloco_cli.protocol.log.heartbeats import MAX_HEARTBEAT_BYTES
    from diloco_cli.protocol.log.keys import SYNCER, heartbeat_key

    heartbeat, heard_s = opened.store.get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES), monotonic_s()
    bear_s = silence_to_bear_s(timeout_s, heartbeat)
    if bear_s > SYNCER_ANSWERS_S:
        talk(f"the syncer is slow at times: it counts as gone after {bear_s:.0f} s of silence")
    while state.next_request <= number and state.phase == "RUNNING" and monotonic_s() - heard_s < bear_s:
        sleep_s(LOOK_EVERY_S)
        state = head_of(opened, state)
        now = opened.store.get(heartbeat_key(SYNCER), MAX_HEARTBEAT_BYTES)
        if now != heartbeat:
            heartbeat, heard_s = now, monotonic_s()
    return state


def answer_here(opened: OpenRun) -> RunState:
    """This command answers all pending requests; it serves the log for that long."""
    from diloco_cli.protocol.actors.operators import StandIn
    from diloco_cli.protocol.log.records import ProcessClaim

    claim = ProcessClaim(0, nonce(), socket.gethostname(), os.getpid(), utc_now_text(), __version__)
    try:
        state = opened.perform(StandIn(opened.format, claim, utc_now_text(), nonce).serve())
    except FencedError:
        return head_of(opened)  # a syncer has come, and goes on with what is left
    tell_regions(opened, state)
    return state


def tell_regions(opened: OpenRun, head: RunState) -> None:
    """While no syncer serves: mirror the commits made here to the regions' own buckets, as far as possible within some
    seconds; the next syncer completes the rest."""
    if not opened.format.regions:
        return
    from diloco_cli.protocol.regions.regional import Home
    from diloco_cli.syncer.regions import RegionServices

    services = RegionServices(opened.format, opened.store, Home(lambda: head), tell=talk)
    services.start()
    services.end(over=True, within_s=REGIONS_WITHIN_S)


def silence_to_bear_s(timeout_s: float | None, heartbeat: bytes | None) -> float:
    """How long a syncer with this last heartbeat may be silent. A command must not fence a syncer that is only slow (a
    large fragment, a slow link): the command leaves again, and the run would have no syncer."""
    from diloco_cli.protocol.actors.standby import LONGER_THAN_USUAL, slowest_s

    return max(SYNCER_ANSWERS_S, LONGER_THAN_USUAL * slowest_s(heartbeat)) if timeout_s is None else timeout_s


def _refusal_of(opened: OpenRun, since: range, number: int, answer: str) -> str | None:
    """Why the request was not carried out, from the commit that answered it, which is the first in `since` to name this
    number or a higher one; None if it was carried out."""
    from diloco_cli.protocol.log.commits import Commit, Refuse
    from diloco_cli.protocol.log.keys import commit_key
    from diloco_cli.protocol.log.wire import MAX_RECORD_BYTES, decode

    for n in since:
        data = opened.store.get(commit_key(n), MAX_RECORD_BYTES)
        commit = decode(Commit, data or b"", commit_key(n))
        if commit.request is not None and commit.request >= number:
            said = commit.reason if isinstance(commit, Refuse) else f"settled by a {commit.kind}: {commit.reason}"
            return None if commit.kind == answer else said
    return None
