"""Codecs and optimizers are declared once: CONTRIBUTING's recipe for another one of each, carried out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_cli.environment import environment_with
from diloco_cli.methods import CODECS, INNER_OPTIMIZERS, OUTER_OPTIMIZERS, arithmetic_of, fitting_outer

ROOT = Path(__file__).resolve().parents[2]
METHODS = ROOT / "diloco_cli" / "methods.py"
RECORDS = {
    "CODECS": '"half": CodecRecord(16, "IEEE half precision", "diloco_cli.tensors.codecs:HALF"),',
    "INNER_OPTIMIZERS": '"heavy": InnerRecord("heavy ball", "diloco_cli.training.inner:heavy", ("momentum_buffer",)),',
    "OUTER_OPTIMIZERS": '"adam": OuterRecord("Adam", "diloco_cli.tensors.merge:adam", ("mean", "square")),',
}
ARITHMETIC = {
    "tensors/codecs.py": "HALF = _plain(torch.float16)\n",
    "training/inner.py": """
class Heavy(_Eager, torch.optim.SGD):
    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


def heavy(groups, settings):
    return Heavy(groups, lr=settings.lr, momentum=settings.beta1)
""",
    "tensors/merge.py": """
def adam(settings, before, delta, after):
    torch.mul(before["mean"], settings.momentum, out=after["mean"]).add_(delta, alpha=1 - settings.momentum)
    torch.mul(before["square"], 0.9, out=after["square"]).addcmul_(delta, delta, value=0.1)
    moved = after["mean"] / (after["square"].sqrt() + 1e-8)
    torch.add(before["parameters"], moved, alpha=-settings.lr, out=after["parameters"])
""",
}
USED = """
from dataclasses import replace

from diloco_cli import methods
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import InnerSettings, OuterSettings, SyncSettings
from diloco_cli.observe.replay import verified
from diloco_cli.plan.link import CODEC_BITS
from diloco_cli.syncer.arithmetic import state_spec
from diloco_cli.tasks.build import build_model
from tests.numerics.harness import make_run, merges, outer_parameters, run_to_end

inner = InnerSettings("heavy", lr=1e-2, warmup_steps=0, save_every=1)
run = make_run(2, 6, SyncSettings(every=4, fragments=2), OuterSettings("adam", 1e-3, 0.9), inner, codec="half")
store, after = run_to_end(run)
found = verified(store, run)
assert found.ok and found.merges >= 4, found  # on a busy machine a slot may pass without one
assert set(state_spec(3, "adam")) == {"parameters", "mean", "square"}
assert methods.OUTER_OPTIMIZERS["adam"].state_bytes == 12
assert CODEC_BITS["half"] == 16 and methods.INNER_OPTIMIZERS["heavy"].state_bytes(0.5) == 4
assert store.list("inner/"), "its moments are saved"
(open("run.yaml", "w")).write(
    "version: 1\\nname: a\\nmodel: {preset: gpt-nano}\\ndata: {preset: python-stdlib}\\n"
    "train: {tokens: 1000000, batch_tokens: 64, inner: {name: heavy}}\\n"
    "sync: {codec: half}\\nouter: {name: adam}\\n"
)
loaded = load_run("run.yaml")
assert (loaded.sync.codec, loaded.train.inner.name, loaded.outer.name) == ("half", "heavy", "adam")
print("used")
"""


def test_every_record_names_arithmetic_that_is_there() -> None:
    for record in (*CODECS.values(), *INNER_OPTIMIZERS.values(), *OUTER_OPTIMIZERS.values()):
        assert arithmetic_of(record) is not None and record.doc


@pytest.mark.parametrize(
    ("inner", "rounds", "outer"),
    [
        *[("adamw", rounds, (0.4, 0.9)) for rounds in (100, 80, 1e6)],
        *[("muon", rounds, (0.7, 0.8)) for rounds in (100, 80, 1e6)],
        *[(inner, rounds, (0.7, 0.5)) for inner in ("adamw", "muon") for rounds in (79.9, 30)],
        *[(inner, rounds, (0.4, 0.5)) for inner in ("adamw", "muon") for rounds in (29.9, 0.1)],
    ],
)
def test_the_outer_settings_fit_the_number_of_rounds(inner: str, rounds: float, outer: tuple[float, float]) -> None:
    assert fitting_outer(inner, rounds) == outer


def test_the_records_need_no_torch() -> None:
    script = "import sys, diloco_cli.methods, diloco_cli.config.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("name", list(CODECS))
def test_the_bits_of_a_codec_are_those_of_its_payloads(name: str) -> None:
    from diloco_cli.tensors.codecs import codec

    size = 1 << 16
    payload = sum(dtype.itemsize * shape[0] for dtype, shape in codec(name).spec(size).values())
    assert CODECS[name].bits == 8 * payload / size


def test_another_codec_and_optimizers_are_a_record_and_their_arithmetic(tmp_path: Path) -> None:
    """In a copy of the package: a codec, an inner optimizer with one moment, an outer one with two buffers. Each opens
    methods.py and the file of its arithmetic; a run is trained with them, verified, planned and read from a file."""
    package = tmp_path / "diloco_cli"
    shutil.copytree(ROOT / "diloco_cli", package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "methods.py").read_text()
    for records, line in RECORDS.items():
        head = next(line for line in text.splitlines() if line.startswith(f"{records}: "))
        text = text.replace(head, f"{head}\n    {line}")
    (package / "methods.py").write_text(text)
    for name, code in ARITHMETIC.items():
        (package / name).write_text((package / name).read_text() + "\n\n" + code)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "templates").symlink_to(ROOT / "templates")
    done = subprocess.run(
        [sys.executable, "-c", USED], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env=environment_with(PYTHONPATH=str(tmp_path)),
    )  # fmt: skip
    assert done.stdout.strip().endswith("used"), done.stderr
