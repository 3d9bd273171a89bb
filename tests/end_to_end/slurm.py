"""A Slurm of its own on this machine, on loopback, as root: two nodes, a partition of both, one that preempts."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

NEEDED = ("slurmctld", "slurmd", "sbatch", "squeue", "setpriv")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
INVENTORY = """\
version: 1
store: {url: bucket, region: us}
islands:
  - {name: iowa, region: us, infra: slurm/us, accelerators: cpu:1, emulate: {slowdown: 3}}
  - {name: rhine, region: eu, infra: slurm/eu, accelerators: cpu:1, emulate: {slowdown: 3}}
"""
SETTINGS = (
    "model.preset=gpt-pico", "train.batch_tokens=256", "train.tokens=2M", "sync.every=16", "train.inner.save_every=2",
    "evaluation.every=1000",
)  # fmt: skip
NAMES = ["iowa", "rhine", "syncer-0", "syncer-1"]
WORDS = {"PENDING": "QUEUED", "COMPLETING": "LEAVING", "CONFIGURING": "STARTING"}
OVER = ("ENDED", "GONE")
WITHIN_S = 300.0
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdTimeout=20
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_min_interval=100000,bf_interval=1
NodeName=us0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=64000
NodeName=eu0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=64000
PartitionName=us Nodes=us0 Default=YES PriorityTier=1 GraceTime=10
PartitionName=eu Nodes=eu0 PriorityTier=1 GraceTime=10
PartitionName=wide Nodes=us0,eu0 PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=us0,eu0 PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} missing (Debian: slurm-wlm)"
    return None if os.getuid() == 0 else "only root starts a Slurm"


class Cluster:
    """`user`: who submits, a plain one if it may enter this interpreter; `folder`: that user's."""

    def __init__(self, base: Path) -> None:
        self.base, self.folder = base, base / "user"
        self.environment = {
            "PATH": os.environ["PATH"], "SLURM_CONF": str(base / "slurm.conf"), "HOME": str(self.folder),
        }  # fmt: skip
        nobody = pwd.getpwnam("nobody")
        self._as: tuple[str, ...] = (
            "setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups",
        )  # fmt: skip
        self.folder.mkdir()
        enters = (*self._as, "/bin/sh", "-c", 'exec "$0" -c ""', sys.executable)  # setpriv itself passes everywhere
        if subprocess.run(enters, capture_output=True, check=False).returncode != 0:
            print(f"jobs are root's: a plain user may not enter {sys.executable}")
            self._as = ()
        else:
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """As the user, in the user's folder."""
        return subprocess.run(
            (*self._as, *words), cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def ask(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *words: str) -> None:
        """A daemon."""
        subprocess.run(words, env=self.environment, check=True, capture_output=True)

    def kill(self, daemon: str) -> None:
        """By the pid that it wrote."""
        path = self.base / "run" / f"{daemon}.pid"
        os.kill(int(path.read_text()), signal.SIGKILL)
        path.unlink()

    def processes(self) -> list[psutil.Process]:
        """All of the cluster, and of its jobs: they have its configuration, which lies in a folder of its own."""
        mine, found = f"\0SLURM_CONF={self.environment['SLURM_CONF']}\0".encode(), []
        for one in psutil.process_iter():
            with suppress(OSError, psutil.Error):  # slurmstepd overwrites the beginning with its title
                if mine in b"\0" + Path(f"/proc/{one.pid}/environ").read_bytes():
                    found.append(one)
        return found

    def kill_steps(self, number: str) -> None:
        """What Slurm keeps beside the processes of this job."""
        for one in self.processes():
            with suppress(psutil.NoSuchProcess):
                if " ".join(one.cmdline()).startswith(f"slurmstepd: [{number}."):
                    one.kill()

    def end(self) -> None:
        """Whatever a test has left of it: a job's processes outlive the daemons."""
        while found := self.processes():
            for one in found:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(found, 10.0)

    def own(self, place: Path) -> None:
        """Give all of it to the user."""
        owner = self.folder.stat()
        for path in (place, *place.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)

    def living(self) -> dict[str, tuple[str, str, str]]:
        """(id, state, node) of each job that lives, by name. Never two of one name run."""
        found: dict[str, tuple[str, str, str]] = {}
        for line in self.ask("squeue", "-h", "-o", "%j|%i|%T|%N").splitlines():
            name, number, state, node = line.split("|")
            assert "RUNNING" not in (state, found.get(name, ("", "", ""))[1]) or name not in found, f"two jobs: {line}"
            found[name] = (number, state, node)
        return found


@contextmanager
def cluster(name: str = "diloco") -> Iterator[Cluster]:
    with ExitStack() as ends:
        base = Path(tempfile.mkdtemp(prefix="diloco-slurm-"))
        ends.callback(shutil.rmtree, base, ignore_errors=True)
        base.chmod(0o755)
        for folder in ("state", "spool", "log", "run"):
            (base / folder).mkdir()
        text = CONFIGURATION.format(
            name=name, base=base, host=socket.gethostname().partition(".")[0], ports=_free_ports(3)
        )
        (base / "slurm.conf").write_text(text)
        place = Cluster(base)
        ends.callback(place.end)
        for words in (("slurmctld", "-i", "-c"), ("slurmd", "-N", "us0"), ("slurmd", "-N", "eu0")):
            place.start(*words)
        eventually(lambda: set(place.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, 60.0)
        yield place


def eventually(holds: Callable[[], object], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"not so within {within_s} s"
        time.sleep(1.0)


class Jobs:
    def __init__(self, place: Cluster) -> None:
        self.place = place

    def diloco(self, *words: str) -> str:
        return self.place.ask(sys.executable, "-P", "-m", "diloco_cli", *words)

    def status(self) -> dict[str, Any]:
        """`status`; what it says of jobs is what the cluster said before or after."""
        for _ in range(10):
            before = self.jobs()
            data: dict[str, Any] = json.loads(self.diloco("status", "quickstart", "--json"))["data"]
            if data["state"] == "FINISHED":  # then nobody is asked
                return data
            told = {job["unit"]: (job["id"], job["state"]) for job in data["jobs"] if job["state"] not in OVER}
            for now in (before, self.jobs()):
                if told == {unit: (number, WORDS.get(state, state)) for unit, (number, state, _) in now.items()}:
                    return data
        raise AssertionError(f"status says {told}, the cluster {now}")

    def jobs(self) -> dict[str, tuple[str, str, str]]:
        living = self.place.living().items()
        return {found[1]: job for name, job in living if (found := re.match(r"diloco-quickstart-\w{6}-(.+)", name))}

    def run(self, *names: str) -> None:
        eventually(lambda: [self.jobs().get(name, "  ")[1] for name in names] == ["RUNNING"] * len(names), WITHIN_S)

    def learner(self, name: str) -> dict[str, Any]:
        return next(one for one in self.status()["learners"] if one["name"] == name)

    def log(self, name: str) -> Path:
        return next(self.place.folder.glob(f"diloco-*-jobs/{name}.log"))

    def trains(self, name: str, incarnation: int) -> None:
        """It steps again. `status` takes a process and more of Slurm's each time: not before the bucket says it."""
        heartbeat = self.place.folder / "bucket" / "quickstart" / "heartbeat" / f"{name}.json"

        def steps(found: dict[str, Any]) -> bool:
            return bool(found["incarnation"] >= incarnation and found["step"] > 0)

        eventually(lambda: heartbeat.exists() and steps(json.loads(heartbeat.read_bytes())), WITHIN_S)
        eventually(lambda: steps(self.learner(name)), WITHIN_S)

    def comes_back(self, name: str, incarnation: int) -> None:
        """It was told to leave, and steps again with the optimizer's moments that it had."""
        self.trains(name, incarnation)
        said = re.findall(r"incarnation (\d+) .* inner moments (\w+)", self.log(name).read_text())
        assert said[-1][1] == "restored", said

    def followed_within_s(self, left: str, follows: str) -> float:
        """From the notice to this syncer until the other one took over, by what they print."""
        notice = re.findall(r"^(\S+) run: leaving", self.log(left).read_text(), re.M)[-1]
        taken = re.findall(r"^(\S+) \S+ takes over", self.log(follows).read_text(), re.M)[-1]
        return (datetime.fromisoformat(taken) - datetime.fromisoformat(notice)).total_seconds()

    def finishes(self) -> None:
        """However long it takes, as long as it goes on."""
        while (found := self.status())["state"] != "FINISHED":
            eventually(lambda before=found["commit"]: self.status()["commit"] > before, WITHIN_S)
        eventually(lambda: not self.jobs(), WITHIN_S)

    def learners(self, name: str, *words: str) -> list[psutil.Process]:
        """The processes of this learner that have these words, too."""
        wanted = {"learner", f"--name={name}", f"--run=file://{self.place.folder}/bucket/quickstart", *words}
        found = [one for one in psutil.process_iter(["cmdline"]) if wanted <= {*(one.info["cmdline"] or [])}]
        return [process for process in found if process.info["cmdline"][0] == sys.executable]

    def kill_learner(self, name: str, *words: str) -> None:
        found = self.learners(name, *words)
        assert found
        for process in found:
            process.kill()

    def launch(self, *words: str) -> None:
        self.diloco("launch", *(word for setting in SETTINGS for word in ("--set", setting)), *words)


@contextmanager
def quickstart() -> Iterator[Jobs]:
    """In two regions, of a user who has not launched it yet."""
    with cluster() as place:
        shutil.copy(EXAMPLE / "run.yaml", place.folder)
        (place.folder / "inventory.yaml").write_text(INVENTORY)
        place.own(place.folder)
        yield Jobs(place)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in bound]
