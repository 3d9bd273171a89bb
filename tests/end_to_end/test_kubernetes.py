"""The engine, by the real kubectl, with a cluster of ours: what it takes away comes back, what it refuses is told."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.config.codec import replace
from diloco_cli.engines.kubernetes import Kubernetes
from diloco_cli.engines.port import Job, JobSpec
from diloco_cli.errors import RefusedError, UsageError
from tests.end_to_end.kubernetes import KubernetesCluster, cluster, eventually, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
RUN = "gs://b/runs/nano"
ENGINE = Kubernetes("kubernetes/fake", "fake", "diloco:1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with cluster(tmp_path, 8) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def spec(unit: str, *command: str, **given: Any) -> JobSpec:
    words = command or ("sleep", "600")
    return JobSpec(RUN, "nano", unit, "kubernetes/fake", words, Path("/f"), Path("/f/l"), **given)


def job(unit: str, engine: Kubernetes = ENGINE) -> Job | None:
    return next((one for one in engine.jobs(RUN, "nano") if one.unit == unit), None)


def becomes(unit: str, state: str, why: str = "", engine: Kubernetes = ENGINE) -> None:
    seen: list[Job | None] = []

    def holds() -> bool:
        seen.append(job(unit, engine))
        return seen[-1] is not None and seen[-1].state == state and why in seen[-1].why

    try:
        eventually(holds)
    except AssertionError:
        raise AssertionError(f"{unit} is {seen[-1]}, not {state}: {why}") from None


def another_pod(place: KubernetesCluster, unit: str, before: list[str]) -> None:
    eventually(lambda: len(place.pods(unit)) == 1 and place.pods(unit) != before)
    becomes(unit, "RUNNING")


def failures(place: KubernetesCluster) -> int:
    return sum(one["status"].get("failed", 0) for one in place.get("jobs"))


def test_what_a_cluster_takes_away_comes_back(place: KubernetesCluster) -> None:
    ENGINE.check(spec("iowa"))
    first = ENGINE.submit(spec("iowa"))
    ENGINE.check(spec("iowa"))
    assert ENGINE.submit(spec("iowa")).id == first.id and len(place.get("jobs")) == 1, "submitted twice"
    becomes("iowa", "RUNNING")
    assert job("iowa").node == "n0"

    (pod,) = place.pods("iowa")
    ENGINE.preempt(job("iowa"))
    another_pod(place, "iowa", [pod])
    assert failures(place) == 0
    (pod,) = place.pods("iowa")
    place.kubectl("delete", "pod", pod, "--wait=false")
    another_pod(place, "iowa", [pod])
    assert failures(place) == 1

    ENGINE.cancel([first])
    eventually(lambda: job("iowa") is None)
    assert not place.pods("iowa")
    ENGINE.cancel([first])


def test_a_job_is_listened_to_and_acted_in(place: KubernetesCluster) -> None:
    ENGINE.submit(spec("iowa", "sh", "-c", "echo one; echo two; echo $$; exec sleep 600"))
    becomes("iowa", "RUNNING")
    (words,) = ENGINE.log_words(RUN, "nano", ["iowa"], 2, False).values()
    eventually(lambda: len(place.kubectl(*words[2:]).splitlines()) == 2)
    two, pid = place.kubectl(*words[2:]).splitlines()
    assert two == "two" and ENGINE.log_words(RUN, "nano", ["iowa"], 2, True) == {("iowa",): (*words, "--follow")}
    assert ENGINE.run_in(job("iowa"), ("sh", "-c", f"kill -9 {pid}; echo 'a  b'"), 30.0) == "a  b\n"
    becomes("iowa", "RUNNING", "again, after: exit code 137")
    with pytest.raises(RefusedError, match="gone wrong; command terminated with exit code 7"):
        ENGINE.run_in(job("iowa"), ("sh", "-c", "echo gone wrong >&2; exit 7"), 30.0)
    ENGINE.submit(spec("wide", cores=64))
    with pytest.raises(RefusedError, match="wide has no pod that runs"):
        ENGINE.run_in(job("wide"), ("true",), 30.0)


def test_what_cannot_go_on_ends_and_what_asks_for_it_comes_back(place: KubernetesCluster, tmp_path: Path) -> None:
    ENGINE.submit(spec("iowa", "sh", "-c", "echo error: another version; exit 12"))
    becomes("iowa", "FAILED", "PodFailurePolicy: exit code 12; error: another version")
    ENGINE.submit(spec("ohio", "no-such-diloco", "unit"))
    becomes(
        "ohio", "FAILED", "ContainerCannotRun, exit code 127; [Errno 2] No such file or directory: 'no-such-diloco'"
    )
    ENGINE.submit(spec("iowa", "sh", "-c", f"[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; exit 75; }}"))
    becomes("iowa", "ENDED")
    assert (tmp_path / "again").exists() and len(place.get("jobs")) == 2


def test_what_a_job_waits_for_is_told(place: KubernetesCluster) -> None:
    ENGINE.submit(spec("wide", cores=64))
    ENGINE.submit(spec("keyless", key=Path("/k")))
    replace(ENGINE, image="missing:1").submit(spec("imageless"))
    becomes("wide", "QUEUED", "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu.")
    becomes("keyless", "HELD", "CreateContainerConfigError: it waits for what is named here: secret")
    becomes("imageless", "HELD", "ImagePullBackOff: ")
    tight = replace(ENGINE, options={"namespace": "tight"})
    tight.submit(spec("tight"))
    becomes("tight", "QUEUED", "FailedCreate: Error creating: ", tight)


def test_a_key_is_in_the_pod_alone_and_goes_with_its_job(place: KubernetesCluster) -> None:
    done = ENGINE.submit(spec("iowa", "sh", "-c", "[ ${#DILOCO_SIGNING_KEY} = 3 ]", key=Path("/k")), "k3y")
    becomes("iowa", "ENDED")
    shown = place.kubectl("get", "jobs,pods", "-o", "json")
    assert len(place.get("secrets")) == 1 and "k3y" not in shown and b64encode(b"k3y").decode() not in shown
    ENGINE.cancel([done])
    eventually(lambda: job("iowa") is None)
    assert place.get("secrets") == []


def test_nodes_meet_at_the_first_of_them(place: KubernetesCluster) -> None:
    """By the words that the fake puts in the place of a Service's names."""
    meet = '[ "$0 $1" = "--rendezvous=127.0.0.1:29400 --node-rank=$JOB_COMPLETION_INDEX" ]'
    ENGINE.submit(spec("big", "sh", "-c", meet, nodes=2))
    becomes("big", "ENDED")
    assert len(place.get("services")) == 1


@pytest.mark.parametrize(
    ("engine", "said", "hint"),
    [
        (replace(ENGINE, context="other"), 'context "other" does not exist', "get-contexts"),
        (replace(ENGINE, options={"namespace": "other"}), 'namespaces "other" not found', "get namespaces"),
        (replace(ENGINE, options={"namespace": "forbidden"}), 'User "u" cannot do this', "auth can-i --list"),
        (replace(ENGINE, options={"namespace": "full"}), "exceeded quota: few", "describe quota"),
        (replace(ENGINE, options={"pod": {"nodeSelectr": {}}}), "strict decoding error: .*nodeSelectr", "launch -n"),
    ],
)
def test_what_is_refused_is_told_in_its_own_words_and_nothing_is_left(
    place: KubernetesCluster, engine: Kubernetes, said: str, hint: str
) -> None:
    for hand_over in (engine.check, engine.submit):
        with pytest.raises(UsageError, match=said) as error:
            hand_over(spec("iowa"))
        assert hint in error.value.hint and error.value.where == "iowa (kubernetes/fake)"
    assert place.get("jobs") == []
