"""`diloco evaluator`: the syncer's child that evaluates the outer parameters; not meant for people.

It reads requests from stdin and answers on stdout."""

from __future__ import annotations

import sys

import typer

from diloco_cli.clock import monotonic_s, sleep_s

REGISTRATION = {"hidden": True}


def evaluator(
    run: str = typer.Option(..., "--run", help="URL of the run's bucket and prefix."),
    device: str | None = typer.Option(None, "--device", help="Where. Default: DILOCO_EVALUATOR_DEVICE, cpu."),
) -> None:
    """Started by the syncer: evaluates committed versions."""
    from diloco_cli.environment import DEVICE_VARIABLE, environment_value
    from diloco_cli.events.bucket import EVALUATOR
    from diloco_cli.protocol.log.commit_log import read_format
    from diloco_cli.runtime.consent import NamedHere, consented, signing_secret
    from diloco_cli.runtime.daemon import SystemClock, perform
    from diloco_cli.runtime.restart import telling_why
    from diloco_cli.store.open import open_store
    from diloco_cli.store.retry import RetryingStore
    from diloco_cli.syncer.evaluation import requests_until_the_syncer_ends, serve_evaluations, take_stdout
    from diloco_cli.training.devices import choose_device

    answers, requests = take_stdout(), requests_until_the_syncer_ends(sys.stdin)
    with telling_why(run, EVALUATOR):
        where = choose_device(device or environment_value(DEVICE_VARIABLE) or "cpu")
        store = RetryingStore(open_store(run))
        read = perform(read_format(run, signing_secret()), store, SystemClock(monotonic_s, sleep_s, lambda: None))
        run_format = consented(read, run, NamedHere())
        serve_evaluations(run_format, store, requests, answers, where)
