"""What `--to torch` holds: all that load_state_dict demands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.codec import replace
from diloco_cli.errors import UsageError
from diloco_cli.export.files import export_file
from diloco_cli.export.naming import whole_state
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.runtime.daemon import perform
from diloco_cli.tasks.build import build_model
from tests.numerics.bucket import begun_run
from tests.numerics.harness import CLOCK


class TiedAndFrozen(nn.Module):
    """A head that is the embedding, a buffer, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1)) * self.frozen
        return F.cross_entropy(self.head(x), targets.flatten())


def test_load_state_dict_is_content_with_tied_names_buffers_and_frozen_parameters(tmp_path: Path) -> None:
    run, store, _ = begun_run(tmp_path / "bucket", "tests.unit.export.test_naming:TiedAndFrozen")
    settings = run.settings.with_consent(True)
    naming = whole_state(settings, run.layout, tied=True)
    export_file(run, perform(read_log(run), store, CLOCK), store, tmp_path / "x.safetensors", naming)
    found = load_file(tmp_path / "x.safetensors")
    model, expected = TiedAndFrozen(), build_model(settings).state_dict()
    model.load_state_dict(found, strict=True)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    once = whole_state(settings, run.layout, tied=False)
    assert [target.name for targets in once.targets.values() for target in targets if "e" in target.name].count(
        "head.weight"
    ) == 0


def test_code_that_builds_another_model_now_is_refused(tmp_path: Path) -> None:
    run, _, _ = begun_run(tmp_path / "bucket", "tests.unit.export.test_naming:TiedAndFrozen")
    settings = run.settings.with_consent(True)
    other = replace(settings, model=replace(settings.model, entrypoint="tests.numerics.tiny:regression"))
    with pytest.raises(UsageError, match=r"trains embedding\.weight \[11, 4\], and .* here has no"):
        whole_state(other, run.layout, tied=True)


class MixedTypes(TiedAndFrozen):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.norm.to(torch.bfloat16)
        for dtype in (torch.float64, torch.float16, torch.int16, torch.bool):
            self.register_buffer(str(dtype)[6:], torch.ones(2, dtype=dtype))


def test_every_tensor_keeps_its_type_unless_one_is_named(tmp_path: Path) -> None:
    run, store, _ = begun_run(tmp_path / "bucket", "tests.unit.export.test_naming:MixedTypes")
    settings = run.settings.with_consent(True)
    naming, state = whole_state(settings, run.layout, tied=True), perform(read_log(run), store, CLOCK)
    export_file(run, state, store, tmp_path / "own", naming)
    export_file(run, state, store, tmp_path / "half", naming, torch.float16)
    built = build_model(settings).state_dict()
    own, half = load_file(tmp_path / "own"), load_file(tmp_path / "half")
    assert all(own[name].dtype == value.dtype and torch.equal(own[name], value) for name, value in built.items())
    assert all(
        value.dtype == (torch.float16 if own[name].is_floating_point() else own[name].dtype)
        for name, value in half.items()
    )


class Complex(TiedAndFrozen):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.ones(2) + 0j)


def test_what_no_file_holds_is_refused_by_its_name(tmp_path: Path) -> None:
    run, _, _ = begun_run(tmp_path / "bucket", "tests.unit.export.test_naming:Complex")
    with pytest.raises(UsageError, match="angles is complex64"):
        whole_state(run.settings.with_consent(True), run.layout, tied=True)
