"""A run on its user's own tokens in a gs:// bucket that fails now and then; a learner and the syncer are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_gcs import FakeGCS
from tests.end_to_end.conftest import EXAMPLES, Playground

TOKENS = 30_000


@pytest.fixture
def gs(playground: Playground) -> Iterator[FakeGCS]:
    with FakeGCS("runs") as server:
        playground.environment["STORAGE_EMULATOR_HOST"] = server.url
        playground.islands("iowa", "ohio", url="gs://runs/here")
        yield server


def trains_through_a_kill(playground: Playground, data: str, gs: FakeGCS | None = None) -> None:
    playground.launch(TOKENS, "--set", f"data={data}")
    playground.wait_for(lambda s: s["commit"] >= 3)
    if gs:
        gs.inject("503", times=40)
    playground.kill("ohio", *(["syncer"] if gs else []))
    playground.wait_for(lambda s: s["state"] == "FINISHED", timeout_s=180)
    found = playground.json("verify", "quickstart")
    assert found["ok"] and found["tokens"] >= TOKENS and found["duplicates"] == 0


def test_a_run_on_shards_in_its_bucket_goes_on_where_a_killed_learner_was(playground: Playground, gs: FakeGCS) -> None:
    """They are made there too; `iowa` and `ohio` share a cache on this machine."""
    made = playground.run("data", "tokenize", f"{EXAMPLES}/*/README.md", "-o", "gs://runs/tokens")
    assert made.returncode == 0 and "100% of the text" in made.stderr, made.stderr
    assert {"tokens/000000.bin", "tokens/index.json"} <= gs.objects["runs"].keys()
    assert playground.json("data", "show", "gs://runs/tokens", "--check")["checked"]
    trains_through_a_kill(playground, "{tokens: gs://runs/tokens, held_out: 0.05}", gs)
    [block] = Path(playground.environment["DILOCO_HOME"], "data", "blocks").glob("[!.]*")
    assert block.read_bytes() == gs.objects["runs"]["tokens/000000.bin"].data


@pytest.mark.long
def test_a_run_on_a_folder_of_text_goes_on_where_a_killed_learner_was(playground: Playground) -> None:
    playground.islands("iowa", "ohio")
    trains_through_a_kill(playground, f"{{text: '{EXAMPLES}/*/README.md', held_out: 0.05}}")
