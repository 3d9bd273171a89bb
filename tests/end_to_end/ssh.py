"""Hosts on loopback: an sshd each, with a home, a host key and a port of its own, under the user who runs the test; and
an `ssh` that knows them by name."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:" + os.environ["PATH"])
SERVER = """\
ListenAddress {address}
Port {port}
HostKey {host}/host_key
AuthorizedKeysFile {base}/key.pub
PidFile {host}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
SetEnv HOME={host}
"""
CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
  User {user}
  HostKeyAlias {name}
  UserKnownHostsFile {base}/known_hosts
  GlobalKnownHostsFile /dev/null
  IdentityFile {base}/key
  IdentitiesOnly yes
  IdentityAgent none
  ControlMaster no
  RemoteCommand tmux attach
"""


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    missing = [name for name in ("ssh", "ssh-keygen", "flock", "setsid") if shutil.which(name) is None]
    missing += [] if SSHD else ["sshd"]
    return f"no ssh to this machine: {', '.join(missing)} missing (Debian: openssh-server)" if missing else None


class Hosts:
    """`path`: where their `ssh` lies, before all others."""

    def __init__(self, base: Path, *names: str) -> None:
        self.base, self.path = base, base / "bin"
        self.path.mkdir()
        self._known = base / "known_hosts"
        self.within: dict[str, tuple[str, ...]] = {}
        (base / "hosts").mkdir()
        (base / "config").write_text(f"Include {base}/hosts/*\n")
        self._key(base / "key")
        for name in names:
            host = base / name
            host.mkdir()
            self._key(host / "host_key")
            (host / ".bash_profile").write_text(f"echo welcome to {name}\nPATH={host}/bin:$PATH\n")
            (host / "bin").mkdir()
            self.installs(name, f'exec {sys.executable} -P -m diloco_cli "$@"')
            self.knows(name)
            self.lies(name, "127.0.0.1")
        (self.path / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {base}/config "$@"\n')
        (self.path / "ssh").chmod(0o755)

    def lies(self, name: str, address: str, *within: str) -> None:
        """It is found at this address. `within`: the words that start its sshd elsewhere."""
        self.ends(name)
        host, port, self.within[name] = self.base / name, _free_port(), within
        (host / "sshd_config").write_text(SERVER.format(address=address, port=port, host=host, base=self.base))
        client = CLIENT.format(name=name, address=address, port=port, user=getpass.getuser(), base=self.base)
        (self.base / "hosts" / name).write_text(client)
        self.starts(name)

    def knows(self, name: str) -> None:
        """The client knows its key as it is now."""
        others = self._known.read_text().splitlines() if self._known.exists() else []
        public = (self.base / name / "host_key.pub").read_text().strip()
        lines = [line for line in others if not line.startswith(f"{name} ")]
        self._known.write_text("\n".join([*lines, f"{name} {public}", ""]))

    def _key(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path), check=True)

    def installs(self, name: str, text: str, interpreter: str = "/bin/sh") -> None:
        """What `diloco` is there."""
        path = self.base / name / "bin" / "diloco"
        path.write_text(f"#!{interpreter}\n{text}\n")
        path.chmod(0o755)

    def starts(self, name: str) -> None:
        assert SSHD is not None
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        log = self.base / name / "sshd.log"
        subprocess.run((*self.within[name], SSHD, "-f", self.base / name / "sshd_config", "-E", log), check=True)

    def servers(self, name: str) -> list[psutil.Process]:
        """Its sshd, with those of open connections; none if it is down."""
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            listener = psutil.Process(int((self.base / name / "pid").read_text()))
            return [listener, *(one for one in listener.children(recursive=True) if one.name() == "sshd")]
        return []

    def cut(self, name: str, sent: signal.Signals = signal.SIGSTOP) -> None:
        """Nobody hears of it any more, until SIGCONT; what runs there goes on."""
        for process in self.servers(name):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(sent)

    def ends(self, name: str) -> None:
        self.cut(name, signal.SIGKILL)
        (self.base / name / "pid").unlink(missing_ok=True)

    def changes_key(self, name: str) -> None:
        self.ends(name)
        self._key(self.base / name / "host_key")
        self.starts(name)

    def units(self) -> list[psutil.Process]:
        """All processes that work there, the keepers of their places too."""
        wanted = [str(self.base / folder.name) for folder in self.base.iterdir() if (folder / "sshd_config").exists()]
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("HOME") in wanted and process.name() != "sshd":
                    found.append(process)
        return found


def why_not_namespaces() -> str | None:
    made = os.getuid() == 0 and shutil.which("ip") is not None
    if made:
        made = subprocess.run(("ip", "netns", "add", "diloco-try"), check=False, capture_output=True).returncode == 0
        subprocess.run(("ip", "netns", "del", "diloco-try"), check=False, capture_output=True)
    return None if made else "no network namespaces here: for root, with iproute2"


@contextmanager
def in_namespace(hosts: Hosts, name: str, number: int) -> Iterator[None]:
    """The host is in a network of its own, at the other end of the link `dl` + name."""
    inside, peer, network = ("ip", "netns", "exec", f"dl{name}"), f"dlpeer{number}", f"10.91.{number}"
    with ExitStack() as ends:
        for words in (
            ("ip", "netns", "add", f"dl{name}"),
            ("ip", "link", "add", f"dl{name}", "type", "veth", "peer", "name", peer, "netns", f"dl{name}"),
            ("ip", "addr", "add", f"{network}.1/24", "dev", f"dl{name}"),
            ("ip", "link", "set", f"dl{name}", "up"),
            (*inside, "ip", "addr", "add", f"{network}.2/24", "dev", peer),
            (*inside, "ip", "link", "set", peer, "up"),
            (*inside, "ip", "link", "set", "lo", "up"),
        ):
            subprocess.run(words, check=True)
            if words[2] == "add" and words[1] in ("netns", "link"):
                undo = ("ip", words[1], "del", f"dl{name}")
                ends.callback(subprocess.run, undo, check=False, capture_output=True)
        ends.callback(hosts.ends, name)
        hosts.lies(name, f"{network}.2", *inside)
        yield


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def ssh_hosts(*names: str) -> Iterator[Hosts]:
    with ExitStack() as ends:
        base = Path(tempfile.mkdtemp(prefix="diloco-ssh-"))
        ends.callback(shutil.rmtree, base, ignore_errors=True)
        place = Hosts(base, *names)
        for name in names:
            ends.callback(place.ends, name)
        yield place
        for process in place.units():
            with suppress(psutil.NoSuchProcess):
                process.kill()
