"""--on-event and --webhook, and where else the two may come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from diloco_cli.events.hooks import Hooks

OnEvent = typer.Option(
    None,
    "--on-event",
    metavar="CMD",
    help="Run this when the run stalls, fails or finishes: JSON on stdin.",
)
Webhook = typer.Option(None, "--webhook", metavar="URL", help="POST the event there as JSON.")


def hooks_of(on_event: str | None, webhook: str | None) -> Hooks:
    """From the flags, else DILOCO_ON_EVENT and DILOCO_WEBHOOK, else the user's own file. Raises UsageError."""
    from diloco_cli.config.layers import read_user_text
    from diloco_cli.events.hooks import Hooks, check_hooks

    command = (on_event, "--on-event") if on_event is not None else read_user_text("on_event")
    address = (webhook, "--webhook") if webhook is not None else read_user_text("webhook")
    check_hooks(Hooks(on_event=command[0]), command[1])
    check_hooks(Hooks(webhook=address[0]), address[1])
    return Hooks(command[0], address[0])
