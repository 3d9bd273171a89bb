"""A sample of the study of a bucket that is far away, without its times: python -m tests.studies.far_bucket"""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.randomness import nonce
from tests.contract.emulators import environment, server
from tests.studies import far_bucket


def test_real_processes_merge_in_a_bucket_that_is_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_bucket, "WARM_UP", 2)
    monkeypatch.setattr(far_bucket, "LIMIT_SLOTS", 100.0)
    with (
        server("fake_gcs", "bucket", "--delay-ms", str(far_bucket.DELAY_MS)) as endpoint,
        environment({"STORAGE_EMULATOR_HOST": endpoint}),
    ):
        found = far_bucket.measured(far_bucket.far_run(2, 0.5), f"gs://bucket/{nonce()}", 0.5, 4, tmp_path)
    assert len(found.gaps_s) == 3 and found.inputs >= 0.5 and found.cpu_s > 0
    assert "a merge each" in found.text(0.5) and '"unit":"syncer"' in found.said
