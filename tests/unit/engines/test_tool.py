"""Foreign commands: their words, their time, their absence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diloco_cli.cli.jobs import ASKED_WITHIN_S
from diloco_cli.engines import tool as tools
from diloco_cli.engines.tool import CONFIG_WITHIN_S, over_ssh, run_tool
from diloco_cli.errors import TryAgainError, UsageError


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tool"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return path


def test_it_reads_what_it_is_given_and_says_it_in_its_own_words(tool: Path) -> None:
    tool.write_text('#!/bin/sh\ncat; echo "$1 $LC_ALL"\n')
    assert run_tool(("tool", "a b"), "given\n", within_s=20.0, refusal=UsageError) == "given\na b C\n"


def test_a_refusal_has_its_words(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nprintf 'tool: no\\n\\033[1msuch thing\\n' >&2; exit 3\n")
    with pytest.raises(UsageError, match=r"^tool: tool: no; \\x1b\[1msuch thing$"):
        run_tool(("tool",), within_s=20.0, refusal=UsageError)
    tool.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(TryAgainError, match=r"^tool: ended with status 3$"):
        run_tool(("tool",), within_s=20.0, refusal=TryAgainError)


def test_one_that_does_not_answer_is_not_waited_for(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(TryAgainError, match=r"tool did not answer within 0\.2 s"):
        run_tool(("tool",), within_s=0.2, refusal=UsageError)


def test_one_that_is_not_there_is_told(tool: Path) -> None:
    tool.unlink()
    with pytest.raises(UsageError, match="no command tool"):
        run_tool(("tool",), within_s=20.0, refusal=TryAgainError)


@pytest.fixture
def played_ssh(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs on this machine what it is to run on a host, in a shell as sshd does; it knows no config."""
    monkeypatch.setattr(tools, "_shared", lambda host: {})
    path = tmp_path / "ssh"
    path.write_text('#!/bin/bash\nwhile [ "$1" != -- ]; do shift; done\nexec sh -c "$3"\n')
    path.chmod(0o755)
    return path


def test_on_a_host_every_word_arrives_as_it_is(
    played_ssh: Path, tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".bash_profile").write_text("echo welcome; cat > /dev/null\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    tool.write_text('#!/bin/sh\ncat; printf "<%s>" "$LC_ALL" "$@"\n')
    words = ("a b", "$(id)", "it's", 'say "no"', "*", "\\", "")
    said = run_tool((str(tool), *words), "given ", within_s=20.0, refusal=UsageError, via="box")
    assert said == "given <C>" + "".join(f"<{word}>" for word in words)


def test_a_login_that_takes_long_holds_up_what_needs_none(played_ssh: Path, tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("sleep 600\n")
    words = over_ssh("box", ("echo", "a  b"), login=False)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    assert subprocess.check_output((played_ssh, *words[1:]), env=environment, timeout=60.0) == b"a  b\n"


def test_a_config_that_does_not_answer_holds_nothing_up(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(tools, "CONFIG_WITHIN_S", 0.1)
    assert over_ssh("slow.config", ("true",))[-2] == "slow.config"
    assert CONFIG_WITHIN_S < ASKED_WITHIN_S


def test_a_link_that_fails_is_told_in_the_last_words_of_ssh(played_ssh: Path) -> None:
    played_ssh.write_text(
        "#!/bin/sh\nprintf '@@@\\nbanner\\nbox has changed\\nHost key verification failed.\\n' >&2; exit 255\n"
    )
    with pytest.raises(TryAgainError, match=r"^ssh box: box has changed; Host key verification failed\.$") as error:
        run_tool(("squeue",), within_s=20.0, refusal=TryAgainError, via="box")
    assert error.value.hint == "what ssh itself says: ssh box true"


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "", "a;id", "box\nid"])
def test_what_is_no_host_is_never_a_word_of_ssh(host: str) -> None:
    with pytest.raises(UsageError, match="no host"):
        over_ssh(host, ("true",))


def test_a_connection_that_a_person_has_opened_is_used(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$3" = own ] && echo "controlpath /home/a/%C"; echo port 22\n')
    (tmp_path / "ssh").chmod(0o755)
    assert any("ControlPath" in word for word in over_ssh("box", ("true",)))
    assert not any("ControlPath" in word for word in over_ssh("own", ("true",)))
