"""`install: wheel` of a site: `launch` brings a wheel of this very installation to a host that has Python and nothing
else, into `DIRECTORY/.diloco/VERSION-DIGEST/` there, once for each digest. The host's own pip brings the dependencies.

    venv   the environment whose `diloco` the site's units are
    log    what pip said
    ready  its version, once all of it is there
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from io import BytesIO
from pathlib import Path
from sys import version_info
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from diloco_cli import __version__
from diloco_cli.digests import digest, short_digest
from diloco_cli.engines.tool import run_tool
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory

PACKAGE = Path(__file__).resolve().parent.parent
FILE = f"diloco-{__version__}-py3-none-any.whl"
INFO = f"diloco-{__version__}.dist-info"
KIND = "Wheel-Version: 1.0\nGenerator: diloco\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LOOKS_WITHIN_S = 15.0
INSTALLS_WITHIN_S = 3600.0  # torch may be gigabytes
IS_FIT = """\
import sys
if sys.version_info < (3, 11):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, and diloco needs 3.11 or newer")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"{sys.executable} cannot make environments with pip (Debian: its package python3-venv)")
"""
PYTHON = """\
python= why=
for name in python{own} python3; do
  found=$(command -v $name) || continue
  said=$("$found" -c {is_fit} 2>&1) && {{ python=$found; break; }}
  why="$why$said
"
done
[ -n "$python" ] || {{ echo "${{why:-there is no command python3}}" >&2; exit 1; }}
"""
INSTALL = """\
install() {{
cd && eval {setup} > /dev/null
umask 077
mkdir -p -- {place} && cd -- {place} || exit 1
exec 9> lock && flock 9 || exit 1  # one after the other
[ -f ready ] && exit
{python}
base64 -d > {file} << END || exit 1
{wheel}
END
if ! {{ "$python" -m venv --clear venv &&
  venv/bin/python -m pip install -q --no-input ./{file}{extras}; }} > log 2>&1; then
  {{ grep '^ERROR' log || tail -n 3 log; }} >&2
  exit 1
fi
venv/bin/diloco --version > new && mv new ready && rm {file}
}}
install < /dev/null
"""
HINT = (
    "a line before it, `setup` of the site: module load python/3.11, or export PIP_INDEX_URL=... for an index that it"
    " reaches; what is there: ssh {host} \"bash -lc 'python3 --version; python3 -m pip config list'\""
)


def setup_line(setup: str, directory: str, install: str | None) -> str:
    """The shell's line before `diloco`, by which it is found where it was brought."""
    if install is None:
        return setup
    path = _export(directory, install)
    return f"{setup.rstrip().removesuffix(';')}; {path}" if setup.strip() else path


def found_there(directory: str, install: str | None) -> str:
    """The part of a script after `setup` by which what was brought is found. It ends it, with the version, where that
    is still to come, and can."""
    if install is None:
        return ""
    ready = _from_anywhere(directory, install, "ready")
    return f"[ -f {ready} ] || {{\n{_python()}exec echo {__version__}\n}}\n{_export(directory, install)}\n"


def _export(directory: str, install: str) -> str:
    return f'export PATH={_from_anywhere(directory, install, "venv/bin")}:"$PATH"'


def _from_anywhere(directory: str, install: str, inside: str = "") -> str:
    """The shell's word for what lies there: a site's `setup` may have gone to another folder."""
    home = "" if directory.startswith("/") else '"$HOME"/'
    return home + shlex.quote(f"{_place(directory, install)}/{inside}".rstrip("/"))


@cache
def bring(host: str, setup: str, directory: str, install: str, tell: Callable[[str], None]) -> None:
    """Install it there, unless it is. Raises UsageError in the words of what failed."""
    place = _place(directory, install)
    is_there = f"[ -f {_from_anywhere(directory, install, 'ready')} ] && echo yes || true\n"
    if run_tool(("bash", "-s"), is_there, within_s=LOOKS_WITHIN_S, refusal=UsageError, via=host, login=False).strip():
        return
    tell(f"{host}: installing diloco {__version__} and what it needs in {place}: once, some minutes")
    script = INSTALL.format(
        setup=shlex.quote(setup or ":"),
        place=_from_anywhere(directory, install),
        python=_python(),
        file=FILE,
        wheel=base64.encodebytes(_wheel()).decode().strip(),
        extras=shlex.quote(install.removeprefix("wheel")),
    )
    try:
        run_tool(("bash", "-s"), script, within_s=INSTALLS_WITHIN_S, refusal=UsageError, via=host)
    except UsageError as error:
        error.hint = error.hint or HINT.format(host=host)
        raise


def _python() -> str:
    """A run's data may be Python's own library: the version that is here comes first."""
    return PYTHON.format(own=f"{version_info.major}.{version_info.minor}", is_fit=shlex.quote(IS_FIT))


def _place(directory: str, install: str) -> str:
    """From the user's home there, or from /."""
    return f"{directory}/.diloco/{folder_of(install)}".removeprefix("./")


def folder_of(install: str) -> str:
    """In whose name all stands that makes one installation another."""
    extras = install.removeprefix("wheel").strip("[]").replace(",", "-")
    return "-".join(filter(None, [__version__, _digest(), extras]))


@cache
def _files() -> Mapping[str, bytes]:
    """What stands in the wheel but for its RECORD: this process's own code, and what its installation says of it."""
    try:
        said = distribution("diloco")
    except PackageNotFoundError:
        hint = "pip install -e CHECKOUT, and launch with the diloco of that environment"
        raise UsageError(
            "install: wheel: this diloco is not installed, so no wheel of it can be made", hint=hint
        ) from None
    found = {f"{INFO}/{name}": (said.read_text(name) or "").encode() for name in ("METADATA", "entry_points.txt")}
    found[f"{INFO}/WHEEL"] = KIND.encode()
    for folder, name in ((PACKAGE, "diloco_cli"), (templates_directory(), "diloco_cli/templates")):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                found[f"{name}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return found


@cache
def _digest() -> str:
    return short_digest(digest(b"".join(f"{name} {len(data)}\n".encode() + data for name, data in _files().items())))


def _wheel() -> bytes:
    """The same bytes each time."""
    files = dict(_files())
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode() for name, data in files.items()}
    lines = [f"{name},sha256={hashes[name].rstrip('=')},{len(data)}" for name, data in files.items()]
    files[f"{INFO}/RECORD"] = "\n".join([*lines, f"{INFO}/RECORD,,", ""]).encode()
    out = BytesIO()
    with ZipFile(out, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = ZipInfo(name)
            entry.compress_type, entry.external_attr = ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return out.getvalue()
