"""How tests are shared among processes (`pytest -n logical --no-loadscope-reorder`), and among threads."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several test processes on the same cores hold each other up
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# What started the tests may ignore these (`nohup`, a shell's background), and would hand that on to what tests start.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine an input may take any time. The same inputs each time: a change is judged by what it changes. The
# long counts have others, and so has --hypothesis-profile random.
settings.register_profile("random", deadline=None)
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")

LONG_TIMEOUT_S = 6 * 3600
BEYOND_CORES = 1  # a whole run waits for much of its time: with one more process the cores are busy meanwhile
WHOLE_RUNS = ("tests/end_to_end/", "tests/studies/")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "long" and not config.getoption("--hypothesis-profile"):
        settings.load_profile("random")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n logical` and `-n auto` mean."""
    return (os.cpu_count() or 1) + BEYOND_CORES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together, for they share what they have made. Those that start whole runs come one after
    the other, for each of them takes all cores."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "whole runs" if nodeid.startswith(WHOLE_RUNS) else str(super()._split_scope(nodeid))

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs fails and says where, also one of full counts (others: `timeout` in pyproject.toml)."""
    for item in items:
        if item.get_closest_marker("long") is not None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.fixture(scope="module", autouse=True)
def _state_of_ones_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests have this machine believe or consent to is not noted among what its user did, nor heard by tests of
    another file, and what that user wishes for all runs holds for none of a test."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def _loaded_for_good() -> None:
    """Or each collection, which every syncer begins with, looks through all that the tests before have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums that are compared bit for bit are rounded in one order, as in a syncer."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
