"""Places with a link of their own on one machine: network namespaces around a bridge, shaped by `tc tbf`. Root only.

Each place is a host of its own: its processes see one interface, whose both directions have the link's speed. The hub
between them has as much as the machine gives.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "diloco-sea"
HUB, NET, INTERFACE = "hub", "10.77.0", "sea0"
MTU, BURST_BYTES, QUEUE_BYTES = 9000, 10_000, 256_000  # a larger burst lets half a small fragment pass unshaped
ENDS_WITHIN_S = 20.0


def why_not() -> str:
    """The reason why this machine has no links to shape; empty if it has."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's; this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)}: not found (Debian: apt-get install iproute2)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1")
        _run("ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", "v0", *_tbf(1e6))
    except RuntimeError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return ""


class Sea:
    """`places`, by name; the first is the hub. Whatever is started in it ends with it."""

    def __init__(self, places: Sequence[str]) -> None:
        self.places = tuple(places)

    def address(self, place: str) -> str:
        return f"{NET}.{1 + self.places.index(place)}"

    def start(self, place: str, words: Sequence[str], more: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
        """The command in that place, with `more` environment; what it says on stderr goes to the log."""
        with log.open("a") as errors:
            return subprocess.Popen(
                ["ip", "netns", "exec", _name(place), *words],
                env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                text=True, cwd=log.parent,
            )  # fmt: skip

    def shape(self, bits_per_s: Mapping[str, float]) -> None:
        """Both directions of these places' links; all others have no bounds."""
        for index, place in enumerate(self.places[1:]):
            for namespace, device in ((_name(place), INTERFACE), (_name(HUB), f"p{index}")):
                words = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
                if place in bits_per_s:
                    _run(*words, "replace", "dev", device, *_tbf(bits_per_s[place]))
                else:
                    subprocess.run([*words, "del", "dev", device, "root"], check=False, capture_output=True)

    def clear(self) -> None:
        """Ends every process that lives in a place, by its pid."""
        for sent in (signal.SIGTERM, signal.SIGKILL):
            ends_s = time.monotonic() + ENDS_WITHIN_S
            for pid in self._pids():
                _signal(pid, sent)
            while self._pids() and time.monotonic() < ends_s:
                time.sleep(0.1)

    def _pids(self) -> list[int]:
        return [int(pid) for place in self.places for pid in _run("ip", "netns", "pids", _name(place)).split()]


@contextmanager
def sea(places: Sequence[str]) -> Iterator[Sea]:
    """Namespaces with this process's id in their names, until the end."""
    made = Sea((HUB, *places))
    try:
        _make(HUB)
        _in(HUB, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _in(HUB, "addr", "add", f"{made.address(HUB)}/24", "dev", "bridge")
        _in(HUB, "link", "set", "bridge", "up")
        for index, place in enumerate(places):
            _make(place)
            port = f"p{index}"
            _in(HUB, "link", "add", port, "mtu", str(MTU), "type", "veth", "peer", "name", INTERFACE)
            _in(HUB, "link", "set", INTERFACE, "netns", _name(place))
            _in(HUB, "link", "set", port, "master", "bridge", "up")
            _in(place, "addr", "add", f"{made.address(place)}/24", "dev", INTERFACE)
            _in(place, "link", "set", INTERFACE, "mtu", str(MTU), "up")
        yield made
    finally:
        names = _run("ip", "netns", "list").split()
        ours = [place for place in (HUB, *places) if _name(place) in names]
        Sea(ours).clear()
        for place in ours:
            _run("ip", "netns", "del", _name(place))


def _make(place: str) -> None:
    _run("ip", "netns", "add", _name(place))
    _in(place, "link", "set", "lo", "up")


def _in(place: str, *words: str) -> None:
    _run("ip", "-n", _name(place), *words)


def _name(place: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{place}"


def _tbf(bits_per_s: float) -> list[str]:
    return ["root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
