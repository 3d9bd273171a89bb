"""A Slurm of its own on this machine, on loopback, as root: two nodes, a partition of both, one that preempts."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "sbatch", "squeue", "setpriv")
CONFIGURATION = """\
ClusterName=diloco
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
def cluster() -> Iterator[Cluster]:
    with ExitStack() as ends:
        base = Path(tempfile.mkdtemp(prefix="diloco-slurm-"))
        ends.callback(shutil.rmtree, base, ignore_errors=True)
        base.chmod(0o755)
        for name in ("state", "spool", "log", "run"):
            (base / name).mkdir()
        text = CONFIGURATION.format(base=base, host=socket.gethostname().partition(".")[0], ports=_free_ports(3))
        (base / "slurm.conf").write_text(text)
        place = Cluster(base)
        ends.callback(_end, base / "run")
        for words in (("slurmctld", "-i", "-c"), ("slurmd", "-N", "us0"), ("slurmd", "-N", "eu0")):
            subprocess.run(words, env=place.environment, check=True, capture_output=True)
        eventually(lambda: set(place.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, 60.0)
        yield place
        for number, _, _ in place.living().values():
            place.run("scancel", number)


def eventually(holds: Callable[[], object], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"not so within {within_s} s"
        time.sleep(1.0)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in bound]


def _end(folder: Path) -> None:
    """Those that were started, by the pids that they wrote."""
    for path in sorted(folder.glob("*.pid")):
        with suppress(ValueError, ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGTERM)
    with suppress(AssertionError):
        eventually(lambda: not any(folder.glob("*.pid")), 10.0)
