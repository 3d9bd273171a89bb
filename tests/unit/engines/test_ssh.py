"""What runs on a host, byte by byte, and what it does there: by this machine's bash, without ssh in between."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diloco_cli import __version__
from diloco_cli.config.codec import replace
from diloco_cli.engines import ssh
from diloco_cli.engines.port import Job, JobSpec, JobState
from diloco_cli.engines.ssh import Ssh, read_jobs, render, tails_of
from diloco_cli.errors import RefusedError, TryAgainError, UsageError
from tests.waiting import wait_until

GOLDEN = Path(__file__).parent / "golden"
RUN = "gs://b/runs/nano"
IOWA = JobSpec(
    run=RUN,
    run_name="nano",
    unit="iowa",
    infra="ssh/box",
    command=("diloco", "unit", "iowa", f"--run={RUN}"),
    folder=Path("/here"),
    log=Path("/here/iowa.log"),
)
BOX = Ssh("ssh/box", "box")


def test_a_script_is_the_same_bytes_each_time() -> None:
    """After a change of `render`: look at the new text, and write it there."""
    signed = replace(IOWA, key=Path("/here/iowa.key"), command=(*IOWA.command, "--allow-code", "$(rm -rf ~)"))
    assert render(signed, "box", ". venv/bin/activate; export A='b c'", "my runs") == (GOLDEN / "iowa.ssh").read_text()
    for harm in ({"run": f"{RUN}\nrm -rf ~"}, {"command": ("diloco", "a\nrm -rf ~")}):
        with pytest.raises(UsageError, match="control characters"):
            BOX.render(replace(IOWA, **harm))


@pytest.mark.parametrize(
    ("word", "state", "why"),
    [
        ("lives", "RUNNING", ""),
        ("0", "ENDED", "the run is over"),
        ("143", "ENDED", "it was asked to leave"),
        ("killed", "GONE", "its process was killed"),
        ("restarted", "GONE", "the host was restarted"),
        ("127", "FAILED", "status 127: its log says why"),
        ("137", "FAILED", "killed by signal 9"),
    ],
)
def test_what_a_host_says_of_a_job(word: str, state: str, why: str) -> None:
    mine = f"{IOWA.name}|71|{word}|{RUN}"
    others = (f"{IOWA.name}|72|lives|gs://other/nano", f"diloco-x|73|lives|{RUN}", "bash: warning")
    assert read_jobs("\n".join([mine, *others]), RUN, "nano", "ssh/box") == [
        Job("iowa", "ssh/box", "71", JobState(state), why)
    ]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host is this machine, with this home, and a `diloco` that plays a unit."""

    def here(
        words: Sequence[str], given: str, *, within_s: float, refusal: type[Exception], via: str, login: bool = True
    ) -> str:
        own = f"{tmp_path}/bin:" if login else ""
        environment = {"PATH": f"{own}/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False, env=environment)
        if done.returncode != 0:
            raise refusal(done.stderr)
        return done.stdout

    monkeypatch.setattr(ssh, "run_tool", here)
    ssh._answer.cache_clear()
    (tmp_path / "bin").mkdir()
    plays(tmp_path, "exec sleep 600")
    return tmp_path


def plays(home: Path, text: str) -> None:
    path = home / "bin" / "diloco"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo {__version__}; exit; }}\n{text}\n')
    path.chmod(0o755)


def job(host: Ssh = BOX) -> Job | None:
    found = host.jobs(RUN, "nano")
    return found[0] if found else None


def is_(state: str, host: Ssh = BOX) -> bool:
    return (found := job(host)) is not None and found.state == state


def test_at_most_one_of_a_name_lives_and_it_leaves_when_it_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ENDS_WITHIN_S", 1)
    assert job() is None
    first = BOX.submit(IOWA)
    assert BOX.submit(IOWA) == first and job() == first
    assert BOX.jobs(RUN, "other") == []
    with monkeypatch.context() as patient:
        patient.setattr(ssh, "ENDS_WITHIN_S", 60)
        BOX.cancel([first])
    wait_until(lambda: is_("ENDED"))
    plays(home, "trap : TERM; while :; do sleep 0.1; done")  # deaf
    again = BOX.submit(replace(IOWA, key=Path("/k")), "its key")
    assert again.id != first.id and job() == again and list(home.rglob("key"))
    BOX.cancel([again, first])
    wait_until(lambda: is_("GONE"))
    assert not list(home.rglob("key"))


def test_of_many_that_start_it_at_once_one_does(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ENDS_WITHIN_S", 0)
    with ThreadPoolExecutor(8) as pool:
        started = set(pool.map(BOX.submit, [IOWA] * 8))
    assert started == {job()}
    BOX.cancel(started)
    wait_until(lambda: not any(job.lives for job in BOX.jobs(RUN, "nano")))


def test_all_of_a_host_leave_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ENDS_WITHIN_S", 1)
    units = [BOX.submit(replace(IOWA, unit=unit)) for unit in ("iowa", "ohio")]
    plays(home, "trap : TERM; while :; do sleep 0.1; done")  # deaf
    units += [BOX.submit(replace(IOWA, unit=unit)) for unit in ("utah", "syncer-0")]
    BOX.cancel(units)
    wait_until(lambda: not any(job.lives for job in BOX.jobs(RUN, "nano")))


def test_a_killed_unit_is_told_from_a_restarted_host(home: Path) -> None:
    pid = int(BOX.submit(IOWA).id)
    os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: is_("GONE"))
    assert [one.why for one in BOX.jobs(RUN, "nano")] == ["its process was killed"]
    lease = next(home.rglob("lease"))
    lease.write_text(f"{pid} another-boot {RUN}\n")
    assert [one.why for one in BOX.jobs(RUN, "nano")] == ["the host was restarted"]


def test_its_key_is_a_file_that_no_other_user_reads(home: Path) -> None:
    plays(home, 'cat "$DILOCO_SIGNING_KEY_FILE"; stat -c %a "$DILOCO_SIGNING_KEY_FILE"; ps -o args= $PPID; exit 12')
    BOX.submit(replace(IOWA, key=Path("/here/key")), "a 'secret'")
    wait_until(lambda: is_("FAILED"))
    said = next(home.rglob("log")).read_text()
    assert said == "a 'secret'600\nbash unit\n" and not list(home.rglob("key")), "it goes with the unit"


def test_a_site_says_what_comes_before_it_and_where_it_works(home: Path) -> None:
    (home / "my runs").mkdir()
    plays(home, 'echo "$WHERE $PWD"')
    leaves = "sleep 600 > left 2>&1 & echo $! >> pids"  # as an agent for keys does
    site = Ssh("ssh/lab", "box", f"export WHERE='in the lab'; echo loaded; cat; {leaves}", "my runs")
    site.check(IOWA)
    job = site.submit(IOWA)
    assert site.run_in(job, ("echo", "a  b", "$(id)"), 10.0) == "a  b $(id)\n"
    with pytest.raises(RefusedError, match="no folder, or two, of unit iowa with process 1"):
        site.run_in(replace(job, id="1"), ("echo",), 10.0)
    wait_until(lambda: is_("ENDED", site))
    assert next(home.rglob("log")).read_text() == f"loaded\nin the lab {home}/my runs\n"
    for pid in (home / "pids").read_text().split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("echo 0.3.9", "diloco there is '0.3.9', here"),
        ("exit 0", "diloco there is '', here"),
        (None, "diloco: not found|diloco: No such file|command not found"),
        ("#!/nowhere/python", "diloco: .*(not found|bad interpreter)"),
        (f"#!{__file__}", "diloco: .*bad interpreter: Permission denied"),
    ],
)
def test_what_could_not_start_there_is_refused_before(home: Path, harm: str | None, words: str) -> None:
    path = home / "bin" / "diloco"
    if harm is None:
        path.unlink()
    else:
        path.write_text(harm if harm.startswith("#!") else f"#!/bin/sh\n{harm}\n")
    with pytest.raises(UsageError, match=words) as error:
        BOX.check(IOWA)
    assert error.value.hint and "ssh box" in error.value.hint
    with pytest.raises(UsageError, match="one host"):
        BOX.check(replace(IOWA, nodes=2))
    assert not (home / ".local").exists()


def test_a_directory_of_a_site_that_is_gone_is_refused_before(home: Path) -> None:
    with pytest.raises(UsageError, match="cd: my runs: No such file or directory") as error:
        Ssh("ssh/box", "box", "", "my runs").check(IOWA)
    assert str(error.value.hint).startswith("ssh box mkdir -p 'my runs'; or") and not (home / ".local").exists()


def test_a_bucket_that_is_a_folder_has_to_be_there_as_far_as_it_is_here(home: Path) -> None:
    bucket = home / "a bucket"
    url = f"file://{bucket}/nano".replace(" ", "%20")
    spec = replace(IOWA, run=url, command=("diloco", "unit", "iowa", f"--run={url}"))
    has_none = Ssh("ssh/box", "box", f"rmdir '{bucket}'")
    has_none.check(spec)
    bucket.mkdir()
    BOX.check(spec)
    with pytest.raises(UsageError, match=f"the folder of the bucket is not there: {bucket}") as error:
        has_none.check(spec)
    assert "a folder that box sees" in str(error.value.hint)


def test_a_host_that_cannot_be_reached_says_nothing_of_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*words: object, refusal: type[Exception], **given: object) -> str:
        raise refusal("ssh box: Connection refused")

    monkeypatch.setattr(ssh, "run_tool", cut)
    with pytest.raises(TryAgainError, match="Connection refused"):
        BOX.jobs(RUN, "nano")


def test_logs_of_several_units_come_over_one_connection_and_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\nthree\n")
    (tmp_path / "b c.log").write_text("four\n")
    logs = {"iowa": "a.log", "rhine": "b c.log"}

    def bash(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(("bash", "-c", script), cwd=tmp_path, capture_output=True, text=True, check=False)

    assert sorted(bash(tails_of(logs, 2, False)).stdout.splitlines()) == ["iowa|three", "iowa|two", "rhine|four"]
    assert bash(tails_of({"iowa": "a.log"}, 1, False)).stdout == "three\n", "one needs no mark"
    (tmp_path / "bar.log").write_text("a\n 50 %")
    ended = bash(tails_of({"mine": "bar.log", **logs}, 1, False)).stdout.splitlines()
    assert sorted(ended) == ["iowa|three", "mine| 50 %", "rhine|four"], "a line without an end takes no other along"
    lacks = bash(tails_of({"mars": "no.log", **logs}, 1, False))
    assert lacks.returncode == 1 and "no.log" in lacks.stderr and "rhine|four" in lacks.stdout
    with subprocess.Popen(
        ("bash", "-c", tails_of(logs, 1, True)), cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as following:
        assert following.stdin is not None and following.stdout is not None
        assert {following.stdout.readline() for _ in logs} == {"iowa|three\n", "rhine|four\n"}
        with (tmp_path / "b c.log").open("a") as log:
            log.write("five\n")
        assert following.stdout.readline() == "rhine|five\n"
        following.stdin.close()
        assert following.stdout.read() == "", "nobody goes on"
