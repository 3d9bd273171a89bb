"""The wheel that a site wants to be brought, and how it gets there: by this machine's bash, without ssh in between."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from diloco_cli import __version__
from diloco_cli.config.codec import replace
from diloco_cli.config.settings import Site
from diloco_cli.engines import slurm, ssh, wheel
from diloco_cli.engines.files import edited, write_job_files
from diloco_cli.engines.sites import engine_of
from diloco_cli.engines.slurm import Slurm
from diloco_cli.engines.ssh import Ssh
from diloco_cli.engines.wheel import bring, setup_line
from diloco_cli.errors import RefusedError, UsageError
from tests.unit.engines.test_slurm import AT_LAB, LAB
from tests.unit.engines.test_ssh import IOWA

OLD = "import sys; sys.version_info, sys.version = (3, 9, 2), '3.9.2'; exec(sys.argv[1])"
OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"  # which comes first
PYTHON = """\
#!/bin/sh
echo "$*" >> ~/asked
case "$1 $2" in
  "-c "*) exec {real} "$2" ;;
  "-m venv") mkdir -p venv/bin && cp "$0" venv/bin/python ;;
  "-m pip") printf '#!/bin/sh\\necho {version}\\n' > venv/bin/diloco; chmod +x venv/bin/diloco; {pip} ;;
esac
"""


def test_a_wheel_has_all_of_this_installation_and_says_so() -> None:
    with zipfile.ZipFile(io.BytesIO(wheel._wheel())) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert {"diloco_cli/cli/main.py", "diloco_cli/config/devices.yaml", "diloco_cli/templates/run.yaml"} <= set(files)
    assert not any("__pycache__" in name for name in files)
    assert (
        b"\nName: diloco\n" in files[f"{wheel.INFO}/METADATA"] and b"diloco" in files[f"{wheel.INFO}/entry_points.txt"]
    )
    rows = {name: (told, size) for name, told, size in csv.reader(io.StringIO(files[f"{wheel.INFO}/RECORD"].decode()))}
    assert rows.pop(f"{wheel.INFO}/RECORD") == ("", "") and rows.keys() == files.keys() - {f"{wheel.INFO}/RECORD"}
    for name, (told, size) in rows.items():
        assert told == f"sha256={base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip('=')}"
        assert int(size) == len(files[name])
    assert wheel._wheel() == wheel._wheel()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user on a host that has Python alone; `home/asked` has what it was asked for."""

    def here(words: Sequence[str], given: str, **others: object) -> str:
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise others["refusal"](done.stderr)
        return done.stdout

    for module in (wheel, ssh, slurm):
        monkeypatch.setattr(module, "run_tool", here)
    (tmp_path / "bin").mkdir()
    has_python(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """As the next command does."""
    bring.cache_clear()
    ssh._answer.cache_clear()


def has_python(home: Path, real: str = f"{sys.executable} -c", pip: str = "exit 0") -> None:
    for name in ("python3", OWN):
        path = home / "bin" / name
        path.write_text(PYTHON.format(real=real, pip=pip, version=__version__))
        path.chmod(0o755)


def asked(home: Path) -> int:
    """How often pip was."""
    return (home / "asked").read_text().count("-m pip install") if (home / "asked").exists() else 0


def test_a_host_with_python_alone_gets_it_once_and_units_find_it(home: Path) -> None:
    told: list[str] = []
    site = Site("ssh", "ssh box", "my runs", setup="export WHERE=lab;", install="wheel[hf,lora]")
    engine = engine_of("ssh/box", site)
    assert isinstance(engine, Ssh)
    engine.check(IOWA)
    assert not list(home.glob("my runs")), "a look changes nothing"
    engine.make_ready(told.append)
    forget()
    engine.make_ready(told.append)
    assert asked(home) == 1 and len(told) == 1 and "my runs/.diloco/" in told[0]
    assert "./diloco-" in (home / "asked").read_text() and ".whl[hf,lora]" in (home / "asked").read_text()
    engine.check(IOWA)
    inside = engine.run_in(engine.submit(IOWA), ("sh", "-c", 'command -v diloco; echo "$WHERE"'), 10.0)
    place, where = inside.splitlines()
    assert place.startswith(f"{home}/my runs/.diloco/{__version__}-") and where == "lab"
    assert not list(home.rglob("*.whl"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in home.rglob(".diloco/**/*") if not path.is_symlink())
    assert next(home.rglob(".diloco")).stat().st_mode & 0o077 == 0


def test_a_setup_that_goes_elsewhere_and_opens_its_files_changes_neither(home: Path) -> None:
    (home / "elsewhere").mkdir()
    engine = engine_of("ssh/box", Site("ssh", "ssh box", ".", setup="cd elsewhere && umask 002", install="wheel"))
    engine.make_ready(lambda line: None)
    assert [path.parent for path in home.rglob("ready")] == list(home.glob(".diloco/*"))
    assert (home / ".diloco").stat().st_mode & 0o077 == 0
    forget()
    engine.make_ready(lambda line: None)
    assert asked(home) == 1
    has_python(home, f'{sys.executable} -c "{OLD}"')  # an error wherever it is not found
    engine.check(IOWA)


def test_a_cluster_behind_a_login_node_gets_it_into_its_own_folder(home: Path) -> None:
    shared = home / "shared"
    engine = Slurm("slurm/lab", "login", str(shared), "", "wheel")
    engine.make_ready(lambda line: None)
    spec = replace(AT_LAB, site=replace(LAB, directory=str(shared), setup=None, install="wheel"))
    *_, found, command = slurm.render(spec, "/bin").splitlines()
    assert found.startswith(f'export PATH={next(shared.glob(".diloco/*/venv/bin"))}:"$PATH"  # ')
    assert command.startswith("exec diloco ")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"real": f'{sys.executable} -c "{OLD}"'}, "is Python 3.9.2, and diloco needs 3.11"),
        (
            {"pip": "echo 'WARNING: slow'; echo 'ERROR: No matching distribution found for torch' >&2; exit 1"},
            "^ERROR: No",
        ),
        ({"pip": "echo 'no space left' >&2; exit 1"}, "no space left"),
    ],
)
def test_what_cannot_be_installed_is_told_and_tried_again(home: Path, harm: dict[str, str], words: str) -> None:
    has_python(home, **harm)
    with pytest.raises(UsageError, match=words) as error:
        bring("box", "", ".", "wheel", lambda line: None)
    assert "PIP_INDEX_URL" in str(error.value.hint) and "ssh box" in str(error.value.hint)
    if "real" in harm:
        with pytest.raises(UsageError, match=words):
            Ssh("ssh/box", "box", install="wheel").check(IOWA)
    has_python(home)
    bring("box", "", ".", "wheel", lambda line: None)
    assert list(home.glob(".diloco/*/ready"))


def test_the_next_python_is_taken_where_the_first_one_makes_no_environments(home: Path) -> None:
    (home / "bin" / OWN).write_text(f"#!/bin/sh\necho {OWN} cannot make environments >&2; exit 1\n")
    Ssh("ssh/box", "box", install="wheel").check(IOWA)
    bring("box", "", ".", "wheel", lambda line: None)
    assert asked(home) == 1
    forget()
    (home / "bin" / "python3").write_text("#!/bin/sh\necho python3 is too old >&2; exit 1\n")
    next(home.rglob("ready")).unlink()
    with pytest.raises(UsageError, match=f"{OWN} cannot make environments\npython3 is too old\n"):
        bring("box", "", ".", "wheel", lambda line: None)


def test_what_acts_beside_a_unit_is_the_diloco_of_its_job(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another one was brought since, after a change of the code."""
    engine = Ssh("ssh/box", "box", "export WHERE=lab", ".", "wheel")
    engine.make_ready(lambda line: None)
    job, old = engine.submit(IOWA), next(home.glob(".diloco/*"))
    cluster = Slurm("slurm/lab", "login", str(home), "export WHERE=lab", "wheel")
    script = slurm.render(replace(AT_LAB, site=cluster_site(home)), f"{home}/bin")
    mine = f"if true; then\n  trap 'echo over' EXIT\nfi\ntouch {home}/again\nexec diloco"  # of a user
    (home / "batch").write_text(script.replace("\nexec diloco", f"\n{mine}"))
    (home / "bin" / "scontrol").write_text('#!/bin/sh\n[ "$*" = "write batch_script 7 -" ] && exec cat ~/batch\n')
    (home / "bin" / "srun").write_text('#!/bin/sh\nwhile [ "$1" != /bin/bash ]; do shift; done\nexec "$@"\n')
    for name in ("scontrol", "srun"):
        (home / "bin" / name).chmod(0o755)
    monkeypatch.setattr(wheel, "_digest", lambda: "another")
    words = ("sh", "-c", 'echo "$(command -v diloco) $WHERE $1"', "sh", "a  b")
    assert engine.run_in(job, words, 10.0) == f"{old}/venv/bin/diloco lab a  b\n"
    assert cluster.run_in(replace(job, id="7"), words, 10.0) == f"{old}/venv/bin/diloco lab a  b\n"
    assert not (home / "again").exists(), "what the job has done is not done again beside its unit"
    engine.make_ready(lambda line: None)
    assert asked(home) == 2 and len(list(home.glob(".diloco/*"))) == 2


def cluster_site(home: Path) -> Site:
    return replace(LAB, directory=str(home), setup="export WHERE=lab", install="wheel")


def test_a_file_of_an_earlier_diloco_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(IOWA, infra="ssh/box", site=Site("ssh", "ssh box", install="wheel"))
    write_job_files(tmp_path / "jobs", [spec], "blake3-ab")
    assert edited(tmp_path / "jobs", spec, "blake3-ab").text
    monkeypatch.setattr(wheel, "_digest", lambda: "another")
    with pytest.raises(RefusedError, match="runs the diloco of the day on which it was written") as error:
        edited(tmp_path / "jobs", spec, "blake3-ab")
    assert "--emit" in str(error.value.hint)


@pytest.mark.parametrize(
    ("setup", "line"),
    [("", 'export PATH="$HOME"/{}'), ("a; b;", 'a; b; export PATH="$HOME"/{}'), ("a", 'a; export PATH="$HOME"/{}')],
)
def test_what_is_brought_comes_first(setup: str, line: str) -> None:
    assert setup_line(setup, ".", "wheel").startswith(line.format(".diloco/")) and setup_line(setup, ".", None) == setup
