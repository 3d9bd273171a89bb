"""Status for Prometheus: OpenMetrics text, and the endpoint that it scrapes, `GET /metrics` with a bearer token.

The names stand beside the fields of `status` (observe/status.py); the Grafana dashboard in templates/ uses them. There
are only counters and gauges, so that the older text format, which node_exporter's textfile collector reads, has the
same meaning. A rollback lowers the counters of merged tokens, which a reader takes for a restart.
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from diloco_cli.errors import DilocoError, UsageError
from diloco_cli.observe.fields import Metric, declared
from diloco_cli.observe.status import LastMerge, LearnerStatus, MirrorStatus, Status, StoreStatus, SyncerStatus
from diloco_cli.paths import MAX_FILE_BYTES, make_directory
from diloco_cli.randomness import new_private_key
from diloco_cli.runtime.registry import run_directory

LOOPBACK, PORT = "127.0.0.1", 9464
SOCKET_S = 10.0
MAX_SCRAPES = 8  # at a time
Labels = dict[str, str]
Rows = Callable[[Status], Iterable[tuple[Labels, Any]]]


def _one(section: object) -> list[tuple[Labels, Any]]:
    return [] if section is None else [({}, section)]


SECTIONS: tuple[tuple[type, Rows], ...] = (
    (Status, _one),
    (LastMerge, lambda status: _one(status.last_merge)),
    (SyncerStatus, lambda status: _one(status.syncer)),
    (StoreStatus, lambda status: _one(status.store)),
    (LearnerStatus, lambda status: [({"learner": one.name, "region": one.region}, one) for one in status.learners]),
    (MirrorStatus, lambda status: [({"region": mirror.region}, mirror) for mirror in status.mirrors]),
)
"""The sections whose fields are exported, and their rows in a status, each with its labels."""


def exported() -> Iterator[tuple[Rows, str, str, Metric]]:
    """(rows, field, what it means, metric) of every exported field."""
    for section, rows in SECTIONS:
        for name, each in declared(section):
            if each.metric is not None:
                yield rows, name, each.doc, each.metric


NAMES = frozenset(metric.sample_name for _, _, _, metric in exported())


class StatusCollector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for rows, field, doc, metric in exported():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = families.setdefault(metric.name, kind(metric.name, doc))
            for labels, row in rows(self._status):
                for more, value in _samples(metric, getattr(row, field), row):
                    family.add_sample(metric.sample_name, {"run": self._status.run, **labels, **more}, value)
        return families.values()


def _samples(metric: Metric, value: Any, row: Any) -> Iterator[tuple[Labels, float]]:
    """None: not known now; the sample is left out."""
    if metric.states:
        yield from (({"state": state}, float(state == value)) for state in metric.states)
        return
    value = value if metric.value is None else metric.value(row)
    if value is not None:
        yield dict(metric.labels), float(value)


def metrics_text(status: Status) -> bytes:
    text: bytes = generate_latest(StatusCollector(status))  # type: ignore[no-untyped-call]
    return text


def address_of(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or a port on loopback."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65_535:
        raise UsageError(f"'{text}' is no address; write HOST:PORT or a port", hint=f"--serve {LOOPBACK}:{PORT}")
    return host.strip("[]") or LOOPBACK, int(port)


def token_of(url: str) -> tuple[str, Path]:
    """The run's token on this machine, made at first use; its file is readable by its owner alone."""
    path = run_directory(url) / "metrics.token"
    make_directory(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        with path.open("rb") as file:
            token = file.read(MAX_FILE_BYTES).decode().strip()
        if token:
            return token, path
        descriptor = os.open(path, os.O_WRONLY)  # cut short by a crash
    token = new_private_key()
    with os.fdopen(descriptor, "w") as new:
        new.write(token)
    return token, path


class MetricsServer(ThreadingWSGIServer):
    """`look` gives the text, and may raise a DilocoError: then the scrape fails, which Prometheus shows as down."""

    request_queue_size = MAX_SCRAPES

    def __init__(self, address: tuple[str, int], token: str, look: Callable[[], bytes]) -> None:
        self._expected, self._look = f"Bearer {token}".encode(), look
        self._lock = Lock()  # one look at the bucket at a time
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Scrape)
        self.set_app(self._answer)

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
        status, kind, body = self._found(environ)
        challenge = [("WWW-Authenticate", "Bearer")] if status.startswith("401") else []
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *challenge])
        return [body]

    def _found(self, environ: dict[str, Any]) -> tuple[str, str, bytes]:
        plain = "text/plain; charset=utf-8"
        if not hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), self._expected):
            return "401 Unauthorized", plain, b"a bearer token is needed: see what `diloco status --serve` said\n"
        if environ["PATH_INFO"] != "/metrics":
            return "404 Not Found", plain, b"only /metrics is here\n"
        try:
            with self._lock:
                return "200 OK", CONTENT_TYPE_LATEST, self._look()
        except DilocoError as error:
            return "503 Service Unavailable", plain, f"{error}\n".encode()


class _Scrape(WSGIRequestHandler):
    timeout = SOCKET_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are no news."""
