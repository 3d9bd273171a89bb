"""Figures of a run as OpenMetrics text, read by Prometheus's own parser; the endpoint; the dashboard."""

from __future__ import annotations

import json
import re
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from diloco_cli.errors import StoreError, UsageError
from diloco_cli.metrics.prometheus import (
    CONTENT_TYPE_LATEST,
    NAMES,
    MetricsServer,
    address_of,
    metrics_text,
    token_of,
)
from diloco_cli.observe.situation import State
from diloco_cli.paths import templates_directory
from tests.unit.observe.situations import HEALTHY, IOWA, SITUATIONS, mirrors, starting


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = openmetrics_parser.text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("name", SITUATIONS)
def test_prometheus_reads_every_situation(name: str) -> None:
    status = SITUATIONS[name]()
    found = samples(metrics_text(status))
    run = ("run", "nano-1b")
    assert found["diloco_tokens_merged_total", frozenset({run})] == status.tokens
    states = {state: found["diloco_state", frozenset({run, ("state", state)})] for state in State}
    assert [state for state, value in states.items() if value] == [status.state]
    direction = frozenset({run, ("direction", "up")})
    assert status.store is not None and found["diloco_store_bytes_total", direction] == status.store.up_bytes


def test_what_is_not_known_is_left_out_and_every_name_occurs_somewhere() -> None:
    early = samples(metrics_text(starting()))
    assert not any(name in ("diloco_loss", "diloco_merge_participants") for name, _ in early)
    assert {name for name, _ in samples(metrics_text(mirrors()))} == NAMES
    older = parser.text_string_to_metric_families(metrics_text(mirrors()).decode())
    assert {sample.name for family in older for sample in family.samples} == NAMES


def test_labels_of_any_text_are_read_back_as_they_were() -> None:
    odd = replace(HEALTHY, learners=[replace(IOWA, name='a"b\\c\nd', region="é")])
    labels = frozenset({("run", "nano-1b"), ("learner", 'a"b\\c\nd'), ("region", "é")})
    assert samples(metrics_text(odd))["diloco_learner_loss", labels] == IOWA.loss


def test_the_dashboard_loads_and_shows_only_what_exists() -> None:
    board = json.loads((templates_directory() / "grafana" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions.append(board["templating"]["list"][1]["query"]["query"])
    used = {name for expression in expressions for name in re.findall(r"\bdiloco_\w+", expression)}
    assert used <= NAMES and len(used) > 15


@pytest.fixture
def port() -> Iterator[int]:
    """An endpoint whose second look fails."""
    answers = iter([metrics_text(HEALTHY)])

    def look() -> bytes:
        for text in answers:
            return text
        raise StoreError("no answer within 9 s", where="gs://b")

    with MetricsServer(("127.0.0.1", 0), "secret", look) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def scrape(port: int, path: str = "/metrics", token: str = "secret") -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
    answer = connection.getresponse()
    return answer.status, answer.headers["Content-Type"], answer.read().decode()


def test_the_endpoint_answers_who_has_the_token_and_nobody_else(port: int) -> None:
    assert scrape(port, token="")[0] == scrape(port, token="other")[0] == scrape(port, token="sécret")[0] == 401
    assert scrape(port, "/")[0] == 404
    assert scrape(port) == (200, CONTENT_TYPE_LATEST, metrics_text(HEALTHY).decode())


def test_a_scrape_fails_where_the_bucket_does_not_answer(port: int) -> None:
    assert [scrape(port)[0], scrape(port)[0]] == [200, 503]


def test_the_token_is_made_once_and_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    token, path = token_of("nano")
    assert len(token) == 64 and token_of("nano") == (token, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("")
    assert len(token_of("nano")[0]) == 64, "one that a crash cut short is made anew"


def test_an_address_may_be_of_version_6() -> None:
    try:
        server = MetricsServer(("::1", 0), "secret", lambda: b"")
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        assert server.socket.family == socket.AF_INET6


def test_an_address_is_a_port_on_loopback_unless_it_names_a_host() -> None:
    assert address_of("9000") == ("127.0.0.1", 9000)
    assert address_of("0.0.0.0:1") == ("0.0.0.0", 1) and address_of("[::1]:2") == ("::1", 2)
    for text in ("host", "host:", "host:99999999", "a:b"):
        with pytest.raises(UsageError):
            address_of(text)
