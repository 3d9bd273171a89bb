"""Commands that go on for days outlive a store that is away for minutes, and end with one that is gone."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from diloco_cli.cli import run_data
from diloco_cli.cli.status import riding_out
from diloco_cli.errors import StoreError
from diloco_cli.store.port import StoreGoneError, StoreUnavailableError


def test_a_feed_goes_on_when_the_store_answers_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_data, "sleep_s", lambda seconds: None)
    feed: Any = Mock()
    feed.send.side_effect = [False, StoreUnavailableError("no answer", where="gs://b"), True]
    run_data.feed_to_the_end(feed)
    assert feed.send.call_count == 3 and "wandb: gs://b: no answer" in capsys.readouterr().err


def test_a_bucket_that_is_gone_ends_them() -> None:
    told: list[str] = []
    with riding_out("events", told.append):
        raise StoreUnavailableError("no answer", where="gs://b")
    with pytest.raises(StoreError), riding_out("events", told.append):
        raise StoreGoneError("no such bucket", where="gs://b")
    assert told == ["events: gs://b: no answer"]
