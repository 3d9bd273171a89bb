"""`diloco status --serve` and `--textfile`: the run's figures as OpenMetrics text."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.cli.export import writing_to
from diloco_cli.cli.output import talk
from diloco_cli.cli.run_argument import OpenRun, boxed
from diloco_cli.cli.watch import Watcher, riding_out
from diloco_cli.clock import sleep_s
from diloco_cli.errors import UsageError
from diloco_cli.runtime.files import write_whole

if TYPE_CHECKING:
    from diloco_cli.store.wrappers import Deadline


READABLE = 0o644  # node_exporter is another user


def serve_metrics(opened: OpenRun, box: Deadline, address: str) -> None:
    """Until Ctrl-C, also when the run has ended: what scrapes may come later."""
    from diloco_cli.metrics.prometheus import MetricsServer, address_of, metrics_text, token_of

    watcher = Watcher(boxed(opened, box), box)
    host, port = address_of(address)
    token, path = token_of(opened.name)
    try:
        server = MetricsServer((host, port), token, lambda: metrics_text(watcher.look()))
    except OSError as error:
        raise UsageError(f"cannot listen: {error.strerror or error}", where=f"{host}:{port}") from error
    with server:
        url = f"http://{host}:{server.server_port}/metrics"
        talk(f"metrics of run {opened.name}: {url}, with the bearer token in {path}")
        server.serve_forever()


def write_metrics(opened: OpenRun, box: Deadline, path: Path, every_s: float | None) -> None:
    """Once, or every so often until the run ends. The file appears whole or not at all."""
    from diloco_cli.metrics.prometheus import metrics_text
    from diloco_cli.observe.situation import OVER

    watcher = Watcher(boxed(opened, box), box)
    while True:
        with riding_out("status") if every_s is not None else nullcontext():
            status = watcher.look()
            _write(path, metrics_text(status))
            if every_s is None or status.state in OVER:
                return
        sleep_s(every_s)


def _write(path: Path, text: bytes) -> None:
    with writing_to(path):
        write_whole(path, text, READABLE)
