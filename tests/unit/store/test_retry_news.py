"""What people hear of a failing store: not every hiccup, not every retry, and when it is over."""

from __future__ import annotations

import pytest

from diloco_cli.clock import wall_s
from diloco_cli.store.retry import Retrying, RetryNews


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 0.0
        self.news = RetryNews(self.lines.append, lambda: self.now_s)

    def fail(self, lasts_s: float, reason: str = "503") -> None:
        self.news.failing(Retrying(wall_s() - lasts_s, 1, "get", reason))


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_a_hiccup_is_not_talked_about(listener: Listener) -> None:
    listener.fail(0.5)
    listener.news.answered(Retrying(wall_s() - 0.7, 1, "get", "503"))
    assert listener.lines == []


def test_a_failure_is_told_once_then_once_a_minute_then_its_end(listener: Listener) -> None:
    for listener.now_s in (2.0, 5.0, 30.0, 61.0, 62.1, 70.0):
        listener.fail(listener.now_s)
    listener.news.answered(Retrying(wall_s() - 75, 9, "get", "503"))
    assert listener.lines == [
        "store: get fails for 2 s: 503", "store: get fails for 62 s: 503", "store: answers again, after 75 s",
    ]  # fmt: skip


def test_a_new_reason_is_told_sooner(listener: Listener) -> None:
    for listener.now_s, reason in ((2.0, "503"), (5.0, "403"), (12.5, "403"), (13.0, "503")):
        listener.fail(listener.now_s, reason)
    assert [line.rsplit(" ")[-1] for line in listener.lines] == ["503", "403"]


def test_the_heartbeat_goes_on_while_a_call_is_repeated(listener: Listener) -> None:
    heartbeats: list[float] = []
    listener.news.heartbeat = lambda: heartbeats.append(listener.now_s)
    for listener.now_s in (0.0, 1.0, 2.9, 3.0, 4.0, 6.5):
        listener.fail(0.1)
    assert heartbeats == [0.0, 3.0, 6.5]
