"""An exported file holds exactly what the log has committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diloco_cli.errors import DataCheckError, TryAgainError
from diloco_cli.export.files import export_file
from diloco_cli.export.naming import own_names
from diloco_cli.protocol.log.commit_log import read_log
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat
from diloco_cli.protocol.log.state import RunState
from diloco_cli.runtime.daemon import perform
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import state_spec
from diloco_cli.tasks.build import build_model
from diloco_cli.tensors.flat import flatten
from diloco_cli.tensors.payload import from_bytes
from tests.numerics.bucket import begun_run
from tests.numerics.harness import CLOCK, key_of_state


def export(run: RunFormat, state: RunState, store: Store, path: Path) -> int:
    return export_file(run, state, store, path, own_names(run.layout))


Begun = tuple[RunFormat, Store, tuple[FragmentVersion, ...], RunState]


@pytest.fixture
def begun(tmp_path: Path) -> Begun:
    run, store, outputs = begun_run(tmp_path / "bucket", "tests.numerics.tiny:regression")
    return run, store, outputs, perform(read_log(run), store, CLOCK)


def test_the_file_holds_the_committed_values_under_the_models_names(begun: Begun, tmp_path: Path) -> None:
    run, store, outputs, state = begun
    path = tmp_path / "model.safetensors"
    assert export(run, state, store, path) == path.stat().st_size
    found = load_file(path)
    for output in outputs:
        fragment = run.layout.fragments[output.fragment]
        values = from_bytes(
            store.get(key_of_state(output)) or b"", state_spec(fragment.num_parameters, run.settings.outer.name)
        )["parameters"]
        assert torch.equal(flatten(fragment, found), values)
    model = build_model(run.settings)
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    model.load_state_dict(found)


def test_the_file_says_where_it_comes_from_and_nothing_is_left_beside_it(begun: Begun, tmp_path: Path) -> None:
    run, store, _, state = begun
    (tmp_path / "out").mkdir()
    export(run, state, store, tmp_path / "out" / "model.safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"run": "tiny", "run_id": "id", "commit": "0", "format": "pt"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_damaged_state_is_not_exported(begun: Begun, tmp_path: Path) -> None:
    run, store, outputs, state = begun
    key = key_of_state(outputs[0])
    data = store.get(key) or b""
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataCheckError, match="other bytes"):
        export(run, state, store, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_before_the_first_version_there_is_nothing_to_export(begun: Begun, tmp_path: Path) -> None:
    with pytest.raises(TryAgainError):
        export(begun[0], RunState(), begun[1], tmp_path / "model.safetensors")
