"""What storm.py compares: how each starts, is killed and ends, and what it has kept.

Whatever is killed is started again at once: by `diloco launch`, by torchrun, and for torchft, which has no command for
it, by a thread here. What starts the others is itself started again after AWAY_S, as a scheduler does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch
import yaml
from kept import HERE, ROOT  # it says where the package lies
from reader import (
    BATCH_TOKENS,
    BETAS,
    CLIP_NORM,
    FRAGMENTS,
    HELD_OUT,
    LR,
    OUTER_LR,
    OUTER_MOMENTUM,
    WEIGHT_DECAY,
    ByteModel,
    H,
    build_data,
)
from restarted import checkpoints, step_of

from diloco_cli.cli.arguments import head_of, open_run
from diloco_cli.paths import user_cache_directory
from diloco_cli.protocol.log.commits import Commit, Merge
from diloco_cli.protocol.log.records import decode
from diloco_cli.store.open import open_store
from diloco_cli.store.port import all_keys
from diloco_cli.syncer.arithmetic import load_versions
from diloco_cli.syncer.evaluation import held_out_loss
from diloco_cli.tensors.flat import bare_tensors

LEARNERS = ("l0", "l1", "l2", "l3")
TARGETS = (*LEARNERS, "syncer", "supervisor")
STEP_S = 0.1
SAVE_EVERY = 20  # steps between checkpoints of the other contenders: 2 s
AWAY_S = 1.0
ENDS_WITHIN_S = 30.0
TORCHFT = "torchft==0.2.0"


class Contender(Protocol):
    def marks(self) -> int:
        """What grows with progress."""

    def kill(self, target: str) -> bool:
        """Whether it was alive, and is dead."""

    def tokens(self) -> float:
        """That are kept, of all islands."""

    def load(self, model: ByteModel) -> None:
        """The parameters that are kept."""

    def close(self) -> None: ...


class HeldOutLoss:
    """The held-out loss of what a contender has kept, the same for all."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model, self.data = ByteModel(0.0).eval(), build_data()

    def of(self, contender: Contender) -> float:
        contender.load(self.model)
        return held_out_loss(self.model, self.data, HELD_OUT)


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "DILOCO_HOME": str(folder / "home"), "PYTHONPATH": f"{HERE}:{ROOT}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """What `diloco` trains: a module here with build_model and build_data, and its part of run.yaml."""

    module: str
    batch_tokens: int
    inner: Mapping[str, object]
    outer: Mapping[str, object]


READER = Workload(
    "reader",
    BATCH_TOKENS,
    {
        "lr": LR, "schedule": "constant", "warmup_steps": 0, "beta1": BETAS[0], "beta2": BETAS[1],
        "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM,
    },
    {"lr": OUTER_LR, "momentum": OUTER_MOMENTUM},
)  # fmt: skip


class Decoupled:
    """`diloco launch` with learners on this machine, and a folder as the bucket. `slower`: by how much each is."""

    def __init__(self, folder: Path, seed: int, slower: Mapping[str, float], trained: Workload = READER) -> None:
        tokens = trained.batch_tokens
        islands = [
            {
                "name": name, "region": "here", "accelerators": "cpu:1", "emulate": {"slowdown": factor},
                "tokens_per_s": tokens / STEP_S / factor,
            }
            for name, factor in slower.items()
        ]  # fmt: skip
        run = {
            "version": 1, "name": "storm", "inventory": "inventory.yaml",
            "model": {"entrypoint": f"{trained.module}:build_model", "args": {"step_s": STEP_S}},
            "data": {"entrypoint": f"{trained.module}:build_data", "shards": 16},
            "train": {
                "tokens": 10**9, "seed": seed, "batch_tokens": tokens, "micro_batch_tokens": tokens,
                "inner": {**trained.inner, "save_every": H},
            },
            "sync": {"every": H, "fragments": FRAGMENTS, "mixing": "rebase"},
            "outer": dict(trained.outer),
            "evaluation": {"every": 1_000_000},
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
        inventory = {"version": 1, "store": {"url": "bucket"}, "islands": islands}
        (folder / "inventory.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
        self.folder, self.environment = folder, environment(folder)
        self._diloco("launch", "run.yaml", "--detach")
        self.url = f"file://{folder}/bucket/storm"
        self.store, self.run = open_store(self.url), open_run(self.url)
        self.head = head_of(self.run)

    def marks(self) -> int:
        return sum(1 for _ in all_keys(self.store, "commit/"))

    def kill(self, target: str) -> bool:
        killed = self._diloco("chaos", "kill", target)
        if target == "supervisor":
            time.sleep(AWAY_S)
            self._diloco("resume", "--detach")
        return killed

    def tokens(self) -> float:
        """Each fragment's merges count all of them."""
        commits = [decode(Commit, self.store.get(key) or b"", key) for key in all_keys(self.store, "commit/")]
        return sum(commit.merged_tokens for commit in commits if isinstance(commit, Merge)) / FRAGMENTS

    def load(self, model: ByteModel) -> None:
        self.head = head_of(self.run, self.head)
        load_versions(self.run.format, self.head.outputs, self.run.store, bare_tensors(model))

    def close(self) -> None:
        self._diloco("stop")
        ours = [one for one in psutil.process_iter(["cmdline"]) if self.url in (one.info["cmdline"] or [])]
        for left in psutil.wait_procs(ours, ENDS_WITHIN_S)[1]:
            left.kill()

    def _diloco(self, *words: str) -> bool:
        done = subprocess.run(
            [sys.executable, "-m", "diloco_cli", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 4):
            print(f"diloco {' '.join(words)}: {done.returncode}: {done.stderr[-300:]}", file=sys.stderr)
        return done.returncode == 0


class Restarted:
    """torchrun with four ranks. Its own death takes them along, and it is started anew, as a scheduler does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start()

    def _start(self) -> None:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1000000"]
        script = [str(HERE / "restarted.py"), str(self.folder), str(STEP_S), str(SAVE_EVERY)]
        # Or ranks that are started again may read the addresses of those before them (pytorch/pytorch#135712).
        fresh = environment(self.folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / "log").open("a") as log:
            self.agent = subprocess.Popen([sys.executable, "-m", *words, *script], env=fresh, stdout=log, stderr=log)

    def marks(self) -> int:
        return step_of(found[-1]) if (found := checkpoints(self.folder)) else 0

    def kill(self, target: str) -> bool:
        if target == "supervisor":
            self.close()
            time.sleep(AWAY_S)
            self._start()
            return True
        rank = LEARNERS.index(target) if target in LEARNERS else 0  # that of the syncer is rank 0's part
        for child in psutil.Process(self.agent.pid).children():
            with suppress(psutil.Error):
                if child.environ().get("RANK") == str(rank):
                    child.kill()
                    return True
        return False

    def tokens(self) -> float:
        return self.marks() * len(LEARNERS) * BATCH_TOKENS

    def load(self, model: ByteModel) -> None:
        model.load_state_dict(torch.load(checkpoints(self.folder)[-1])["model"])

    def close(self) -> None:
        ranks = psutil.Process(self.agent.pid).children(recursive=True)
        self.agent.kill()
        self.agent.wait()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()


class Tolerant:
    """Replicas of torchft's DiLoCo and its lighthouse, which is to it what the syncer is to `diloco`. A thread starts
    anew what has ended; that is the supervisor, and killed it does nothing for AWAY_S."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.environment = folder, environment(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.parts = {name: self._started(name) for name in ("syncer", *LEARNERS)}
        self.supervised, self.ended = threading.Event(), threading.Event()
        self.supervised.set()
        self.supervisor = threading.Thread(target=self._supervise)
        self.supervisor.start()

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        if name == "syncer":
            waits = ["--heartbeat_timeout_ms=1000", "--join_timeout_ms=10000", "--quorum_tick_ms=100"]
            words = [
                torchft_python().with_name("torchft_lighthouse"),
                "--min_replicas=1",
                "--bind",
                self.address,
                *waits,
            ]
        else:
            about = [self.folder, STEP_S, SAVE_EVERY, LEARNERS.index(name), len(LEARNERS), f"http://{self.address}"]
            words = [torchft_python(), HERE / "tolerant.py", *about]
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(list(map(str, words)), env=self.environment, stdout=log, stderr=log)

    def _supervise(self) -> None:
        while not self.ended.wait(0.1):
            for name, part in self.parts.items():
                if self.supervised.is_set() and part.poll() is not None:
                    self.parts[name] = self._started(name)

    def marks(self) -> int:
        return step_of(found[-1]) if (found := checkpoints(self.folder)) else 0

    def kill(self, target: str) -> bool:
        if target == "supervisor":
            self.supervised.clear()
            time.sleep(AWAY_S)
            self.supervised.set()
            return True
        alive = self.parts[target].poll() is None
        self.parts[target].kill()
        return alive

    def tokens(self) -> float:
        """Of a fragment's exchange each replica that took part counts."""
        if not (found := checkpoints(self.folder)):
            return 0.0
        return torch.load(found[-1])["torchft"]["batches_committed"] * H / FRAGMENTS * BATCH_TOKENS

    def load(self, model: ByteModel) -> None:
        saved = torch.load(checkpoints(self.folder)[-1])["user"]
        for number, part in enumerate(model.parts()):
            part.load_state_dict(saved[f"StreamingDiLoCoFragment_{number}"]["original_parameters"])

    def close(self) -> None:
        self.ended.set()
        self.supervisor.join()
        for part in self.parts.values():
            part.kill()
            part.wait()


def torchft_python() -> Path:
    return user_cache_directory("comparison") / TORCHFT / "bin" / "python"


def why_no_torchft() -> str:
    """Empty if torchft is there; else it is installed beside the packages of this interpreter, whose torch it uses."""
    python = torchft_python()
    folder = python.parents[1]
    check = [python, "-c", "import torchft.local_sgd"]

    def said(*words: str | Path) -> str:
        try:
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        except OSError as error:
            return str(error)
        return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]

    if not said(*check):
        return ""
    if reason := said(sys.executable, "-m", "venv", "--clear", folder):
        return reason
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return said(python, "-m", "pip", "install", "--quiet", TORCHFT) or said(*check)


@dataclass(frozen=True)
class Entry:
    name: str
    start: Callable[[Path, int], Contender]


CONTENDERS = {
    "ddp": Entry("data-parallel, restarted by torchrun", lambda folder, seed: Restarted(folder)),
    "torchft": Entry("DiLoCo of torchft 0.2.0", lambda folder, seed: Tolerant(folder)),
    "diloco": Entry("`diloco`", lambda folder, seed: Decoupled(folder, seed, dict.fromkeys(LEARNERS, 1.0))),
}
