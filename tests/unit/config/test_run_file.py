"""run.yaml: what is written is typed; what is wrong names its place and what is allowed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from diloco_cli.config import settings
from diloco_cli.config.run_file import inventory_path_of, load_run, load_run_with_origins
from diloco_cli.errors import UsageError

GOOD = """\
version: 1
name: nano
inventory: fleet/inventory.yaml
model: {preset: gpt-nano}
data: {preset: python-stdlib}
train: {tokens: 20B, batch_tokens: 1024, inner: {lr: 1e-4}}
sync:
  every: 40
  fragments: 4
  grace: {gamma: 0.25}
  skip_after: 90 s
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(dedent(text))
    return path


def test_values_and_defaults_are_typed(tmp_path):
    run = load_run(write(tmp_path, GOOD))
    assert run.train.tokens == 20_000_000_000
    assert run.train.inner.lr == 1e-4
    assert run.sync.grace.gamma == 0.25
    assert run.sync.skip_after_s == 90.0
    assert run.sync.overlap == "auto"
    assert run.outer == settings.OuterSettings()


def test_the_inventory_is_found_beside_the_run_file(tmp_path):
    path = write(tmp_path, GOOD)
    assert inventory_path_of(load_run(path), path) == tmp_path / "fleet" / "inventory.yaml"


def test_overrides_win_and_say_where_they_come_from(tmp_path):
    path = write(tmp_path, GOOD)
    run, origins = load_run_with_origins(path, ["sync.every=50", "sync.grace={gamma: 0.75}", "train.seed=3"])
    assert (run.sync.every, run.sync.grace.gamma, run.train.seed) == (50, 0.75, 3)
    assert origins["sync.every"] == "--set sync.every=50"
    assert origins["sync.fragments"] == f"{path}:9"
    assert "sync.quorum" not in origins


MALFORMED = [
    (
        "sync.evry=3",
        "--set sync.evry=3: sync: unknown key 'evry'; did you mean every?; allowed: every, fragments",
    ),
    ("sync.every=0", "sync.every: must be at least 1, not 0"),
    ("sync.every=fast", "sync.every: count 'fast' is no number with a unit; write a whole number"),
    ("sync.fragments=0", "sync.fragments: must be from 1 to 4096, not 0"),
    ("sync.fragments=2.5", "sync.fragments: must be a whole number, not 2.5"),
    ("sync.quorum=0", "sync.quorum: must be at least 1, not 0"),
    ("sync.grace.gamma=1", "sync.grace.gamma: must be above 0 and below 1, not 1"),
    ("sync.grace=0.5", "sync.grace: must be a mapping, not 0.5"),
    ("sync.overlap=never", "sync.overlap: must be a whole number, not 'never'; 'auto' is allowed too"),
    ("sync.codec=bf61", "sync.codec: must be one of fp32, bf16, int8, int4, not 'bf61'; did you mean bf16?"),
    ("sync.skip_after=60", "sync.skip_after: duration '60' has no unit"),
    ("sync.skip_after_s=60", "sync: unknown key 'skip_after_s'; did you mean skip_after?"),
    ("train.inner.lr=0", "train.inner.lr: must be above 0, not 0"),
    ("train.inner.lr=.nan", "train.inner.lr: must be a finite number, not .nan"),
    ("train.inner.lr=true", "train.inner.lr: must be a number, not true"),
    ("train.tokens=-5", "train.tokens: count '-5' must not be negative"),
    ("outer.momentum=1.0", "outer.momentum: must be at least 0 and below 1, not 1.0"),
    ("name=Nano_1", "name: must be a name (lower-case letters"),
    ("name=" + "n" * 64, "name: must be a name"),
    ("model.preset=gpt-nanno", "model.preset: must be one of gpt-pico, gpt-nano"),
    ("model={preset: gpt-nano, huggingface: x}", "model: give one of preset and huggingface, not both"),
    ("model={huggingface: x, layers: 2}", "model: plain numbers need all four; missing: parameters"),
    ("model={preset: gpt-nano, weights: random}", "model: weights belongs to huggingface, and there is none"),
    ("model={preset: gpt-nano, revision: main}", "model: revision belongs to huggingface, and there is none"),
    ("model={huggingface: x, weights: all}", "model.weights: must be one of pretrained, random, not 'all'"),
    ("model={huggingface: x, weights: pretrained, initial: y}", "model: give initial or weights: pretrained, not both"),
    ("model={huggingface: x, weights_digest: md5-0}", "model.weights_digest: must be a digest"),
    ("data.preset=digits", "data.preset: gpt-nano reads python-stdlib, not digits"),
    ("train.precision=fp16", "train.precision: must be one of auto, fp32, bf16"),
    ("model.layers=3", "model: the preset already says 'layers'"),
    ("model={parameters: 1B, layers: 16}", "model: plain numbers need all four; missing: width, sequence"),
    ("model={}", "model: nothing says which model; give a preset (gpt-pico"),
    ("model={entrypoint: nomodule}", "model.entrypoint: must be package.module:function, not 'nomodule'"),
    ("data={}", "data: nothing says which data"),
    ("version=2", "version: 2 is newer than this diloco reads (1)"),
    ("version=one", "version: must be 1, not 'one'"),
    ("sync", "--set sync: cannot be read; write --set key.key=value"),
    ("name.first=x", "'first' lies inside a value that is no mapping"),
    ("train={tokens: [}", "--set train={tokens: [}: not valid YAML"),
]


@pytest.mark.parametrize(("override", "message"), MALFORMED, ids=[override[:40] for override, _ in MALFORMED])
def test_malformed_values_are_refused_with_what_is_allowed(tmp_path, override, message):
    with pytest.raises(UsageError) as caught:
        load_run(write(tmp_path, GOOD), [override])
    assert message in str(caught.value)
    assert caught.value.exit_status == 2


def test_errors_in_the_file_name_its_line(tmp_path):
    path = write(tmp_path, GOOD.replace("fragments", "fragmnts"))
    with pytest.raises(UsageError) as caught:
        load_run(path)
    assert caught.value.where == f"{path}:9"


def test_a_missing_name_is_named(tmp_path):
    with pytest.raises(UsageError, match="the key 'name' is missing"):
        load_run(write(tmp_path, GOOD.replace("name: nano\n", "")))
