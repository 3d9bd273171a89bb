"""A sample of the benchmark of a merge in a bucket that is far away: its rows, not its times."""

from __future__ import annotations

from tests.benchmarks import far_merge
from tests.contract.emulators import environment, server


def test_a_merge_of_payloads_on_a_far_store_is_taken_apart() -> None:
    with (
        server("fake_gcs", "bucket", "--delay-ms", "1") as url,
        environment({"STORAGE_EMULATOR_HOST": url}),
    ):
        rows = far_merge.compared(url, 1 << 18, 1)
    assert len(rows) == 7 and "8 payloads of 0 MB to the commit, s (uploads are checked)" in rows[0]
