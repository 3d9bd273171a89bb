"""An island that joins counts its tokens by the run's whole sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco_cli.config.settings import DataSettings, ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.learner.daemon import check_batch
from diloco_cli.protocol.log.records import RunFormat
from tests.unit.protocol.records import RUN


def run_of(model: ModelSettings, data: DataSettings) -> RunFormat:
    return replace(RUN, settings=replace(RUN.settings, model=model, data=data))


PICO = run_of(ModelSettings(preset="gpt-pico"), DataSettings(preset="python-stdlib"))


@pytest.mark.parametrize(("batch", "offered"), [(100, 128), (1, 64), (1000, 1024)])
def test_half_a_sequence_is_refused_with_the_nearest_number_that_fits(batch: int, offered: int) -> None:
    with pytest.raises(UsageError, match="multiple of the run's sequence length, 64") as refused:
        check_batch(PICO, batch)
    assert refused.value.hint == f"--batch-tokens {offered}"


def test_whole_sequences_pass_and_so_does_what_only_a_users_code_can_tell() -> None:
    check_batch(PICO, 640)
    own = run_of(
        ModelSettings(entrypoint="tests.numerics.tiny:slope"), DataSettings(entrypoint="tests.numerics.tiny:stream")
    )
    check_batch(own, 7)
