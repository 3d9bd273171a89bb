"""Jobs byte by byte, what kubectl's lists mean, and that Kubernetes' own schemas allow what is handed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from diloco_cli.config.codec import replace
from diloco_cli.engines import kubernetes
from diloco_cli.engines.kubernetes import RETRIED, Kubernetes, documents, job_name, merged, read_jobs
from diloco_cli.engines.port import JobSpec
from diloco_cli.errors import TryAgainError, UsageError

GOLDEN = Path(__file__).parent / "golden"
RUN = "gs://b/runs/nano"
IOWA = JobSpec(
    run=RUN,
    run_name="nano",
    unit="iowa",
    infra="kubernetes/gke",
    command=("diloco", "unit", "iowa", f"--run={RUN}"),
    folder=Path("/here"),
    log=Path("/here/nano-jobs/iowa.log"),
    nodes=2,
    cores=8,
    gpus=8,
    memory_gb=96,
    key=Path("/here/nano-jobs/iowa.key"),
)
SYNCER = replace(IOWA, unit="syncer-0", nodes=1, cores=2, gpus=0, memory_gb=6, key=None, busy_cores=0.1)
OPTIONS = {
    "namespace": "ml",
    "queue": "spot",
    "pod": {"serviceAccountName": "diloco", "nodeSelector": {"pool": "h100"}},
    "container": {"resources": {"limits": {"memory": "128Gi"}}},
}
GKE = Kubernetes("kubernetes/gke", "gke", "ghcr.io/me/diloco:1")
BOTH = [(IOWA, replace(GKE, options=OPTIONS)), (SYNCER, GKE)]


@pytest.mark.parametrize(("spec", "engine"), BOTH, ids=["iowa", "syncer-0"])
def test_a_job_is_the_same_bytes_each_time(spec: JobSpec, engine: Kubernetes) -> None:
    """After a change of `documents`: look at the new text, and write it there."""
    assert engine.render(spec) == (GOLDEN / f"{spec.unit}.yaml").read_text()


@pytest.mark.parametrize("version", ["1.31", "1.33", "1.37"])
@pytest.mark.parametrize(("spec", "engine"), BOTH, ids=["iowa", "syncer-0"])
def test_kubernetes_itself_allows_it(spec: JobSpec, engine: Kubernetes, version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in yaml.safe_load_all(engine.render(spec)):
        checker.validate(document, version, strict=True)


def test_a_name_is_a_hosts_name_whatever_the_run_and_the_unit_are_called() -> None:
    long = [replace(IOWA, run_name="r" * 63, unit=unit) for unit in ("u" * 63, "u" * 62 + "v")]
    names = {job_name(spec) for spec in [*long, replace(IOWA, run="gs://other/nano"), IOWA]}
    assert len(names) == 4 and max(map(len, names)) + len("-99999") <= 63


@pytest.mark.parametrize(("busy", "cpu"), [(0.0, "0.25"), (0.404, "0.4"), (3.0, "2"), (None, "2")])
def test_a_syncer_asks_for_what_the_plan_keeps_busy_and_for_a_quarter_of_a_core_at_least(
    busy: float | None, cpu: str
) -> None:
    (job,) = documents(replace(SYNCER, busy_cores=busy), "i", {})
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == cpu


def test_what_a_bucket_says_is_no_variable_of_the_pod() -> None:
    (job,) = documents(replace(SYNCER, command=("diloco", "unit", "$(SECRET)")), "i", {})
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][2] == "$$(SECRET)"


def test_a_site_adds_replaces_and_removes() -> None:
    ours = {"a": {"b": 1, "c": 2}, "d": [1], "e": 5}
    assert merged(ours, {"a": {"b": None, "f": {"g": 3}}, "d": [2], "e": 6}) == {
        "a": {"c": 2, "f": {"g": 3}}, "d": [1, 2], "e": 6,
    }  # fmt: skip
    assert ours == {"a": {"b": 1, "c": 2}, "d": [1], "e": 5}


@pytest.mark.parametrize(
    ("engine", "spec", "said"),
    [
        (replace(GKE, image=""), IOWA, "kubernetes/gke has no image for its pods"),
        (
            replace(GKE, options={"quue": "x"}),
            IOWA,
            r"'quue' is none of namespace \(str\), queue \(str\), pod \(dict\)",
        ),
        (replace(GKE, options={"pod": "x"}), IOWA, "'pod' is none of"),
        (GKE, replace(IOWA, run="file:///here/nano"), "pods do not see the folder /here/nano"),
        (GKE, replace(IOWA, command=("diloco", "--run=file:///there")), "pods do not see the folder /there"),
    ],
)
def test_what_no_pod_could_run_is_refused(engine: Kubernetes, spec: JobSpec, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        engine.submit(spec)


def test_an_edited_text_counts_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(kubernetes, "run_tool", lambda words, text="", **others: given.append(text) or "")
    text = GKE.render(SYNCER).replace("image: ghcr.io/me/diloco:1", "image: other:2")
    lost = [line for line in GKE.render(SYNCER).splitlines() if line not in text.splitlines()]
    assert lost and all(GKE.may_change.match(line) for line in lost)
    replace(GKE, image="").check(replace(SYNCER, text=text))
    assert json.loads(given[0])["spec"]["template"]["spec"]["containers"][0]["image"] == "other:2"
    for harmed in (text.replace("spec:", "spec: x"), text.replace("containers", "container"), "", "- 1"):
        with pytest.raises(UsageError, match="this is no Job"):
            GKE.check(replace(SYNCER, text=harmed))


def test_a_folder_that_is_mounted_there_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {"container": {"volumeMounts": [{"name": "nfs", "mountPath": "/here"}]}}
    monkeypatch.setattr(kubernetes, "run_tool", lambda *words, **others: "")
    replace(GKE, options=mounts).check(replace(SYNCER, run="file:///here/nano"))


def test_a_crash_comes_back_and_what_would_end_alike_does_not() -> None:
    assert {75, 137, 139, 143} < set(RETRIED) and not {0, 1, 2, 9, 12, 127} & set(RETRIED)


def job(*conditions: dict[str, Any], unit: str = "iowa", **spec: Any) -> dict[str, Any]:
    made, *_ = documents(replace(SYNCER, unit=unit), "i", {})
    held = [{"status": "True", **one} for one in conditions]
    return {**made, "spec": {**made["spec"], **spec}, "status": {"conditions": held}}


def pod(phase: str, number: int = 0, unit: str = "iowa", index: int = 0, **status: Any) -> dict[str, Any]:
    """`state`: of its container; `conditions`: of the pod; `leaves`: it is told to end."""
    state, leaves = status.pop("state", None), status.pop("leaves", False)
    if state is not None:
        status["containerStatuses"] = [{"name": "sidecar", "state": {}}, {"name": "unit", "state": state}]
    meta = {
        "name": f"p{number}",
        "labels": {"batch.kubernetes.io/job-name": job_name(replace(SYNCER, unit=unit))},
        "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": f"2026-11-29T00:00:{number:02}Z",
        **({"deletionTimestamp": "2026-11-29T00:01:00Z"} if leaves else {}),
    }
    spec = {"nodeName": f"n{number}"} if phase == "Running" else {}
    return {"kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": phase, **status}}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason}}


UNSCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available",
}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
OOM = pod("Failed", state=ended(137, "OOMKilled"))
FAILED = {"type": "Failed", "reason": "PodFailurePolicy", "message": "Container unit failed"}


@pytest.mark.parametrize(
    ("own", "pods", "state", "why"),
    [
        (job(), [], "QUEUED", "it has no pod yet"),
        (job(), [pod("Pending", conditions=[UNSCHEDULED])], "QUEUED", "Unschedulable: 0/3 nodes are available"),
        (job(), [pod("Pending", state=waits("ContainerCreating"))], "STARTING", "ContainerCreating"),
        (job(), [pod("Pending")], "STARTING", ""),
        (
            job(),
            [pod("Pending", state=waits("ImagePullBackOff", "Back-off pulling image"))],
            "HELD",
            "ImagePullBackOff: the image is not there, or not for this cluster: Back-off pulling image",
        ),
        (
            job(),
            [pod("Pending", state=waits("CreateContainerConfigError", 'secret "x" not found'))],
            "HELD",
            'CreateContainerConfigError: it waits for what is named here: secret "x" not found',
        ),
        (job(), [pod("Running")], "RUNNING", ""),
        (job(), [OOM, pod("Running", 1)], "RUNNING", "again, after: OOMKilled, exit code 137"),
        (job(), [OOM], "QUEUED", "OOMKilled, exit code 137; another pod follows"),
        (
            job(),
            [pod("Failed", reason="Evicted", message="The node was low on resource: memory.")],
            "QUEUED",
            "Evicted, The node was low on resource: memory.; another pod follows",
        ),
        (job(), [pod("Running", leaves=True, conditions=[EVICTED])], "LEAVING", "EvictionByEvictionAPI"),
        (job(), [pod("Succeeded", state=ended(0, "Completed"))], "LEAVING", ""),
        (job({"type": "Complete"}), [], "ENDED", ""),
        (job({"type": "SuccessCriteriaMet"}), [pod("Running")], "LEAVING", ""),
        (job(FAILED), [pod("Failed", state=ended(12))], "FAILED", "PodFailurePolicy: exit code 12"),
        (
            job(FAILED),
            [
                pod(
                    "Failed",
                    state={"terminated": {**ended(2)["terminated"], "message": "a log\nerror: no\n  hint: yes\n"}},
                )
            ],
            "FAILED",
            "PodFailurePolicy: exit code 2; error: no; hint: yes",
        ),
        (job(FAILED), [], "FAILED", "PodFailurePolicy: Container unit failed"),
        (
            job(suspend=True),
            [],
            "HELD",
            'Suspended: kubectl patch job diloco-nano-iowa-ba8a0c9e7390 -p \'{"spec": {"suspend": false}}\'',
        ),
        (job(completions=2), [pod("Running")], "QUEUED", "it has no pod yet"),
        (job(completions=2), [pod("Running"), pod("Running", 1, index=1)], "RUNNING", ""),
        (
            job(completions=2),
            [pod("Running"), pod("Pending", 1, index=1, state=waits("ErrImagePull", "no"))],
            "HELD",
            "ErrImagePull: the image is not there, or not for this cluster: no",
        ),
    ],
)
def test_what_a_job_and_its_pods_mean(own: Any, pods: list[Any], state: str, why: str) -> None:
    text = json.dumps({"kind": "List", "items": [*reversed(pods), own]})
    (found,) = read_jobs(text, RUN, "kubernetes/gke")
    assert (found.unit, found.id, found.state, found.why) == ("iowa", job_name(replace(IOWA)), state, why)
    running = sorted(one["metadata"]["name"].replace("p", "n") for one in pods if one["status"]["phase"] == "Running")
    assert found.node == ("" if state in ("ENDED", "FAILED") else ",".join(running))


def test_a_command_that_deletes_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(words: tuple[str, ...], text: str = "", **given: Any) -> str:
        if "create" in words and '"kind": "Service"' in text:
            raise UsageError("kubectl: services already exists (AlreadyExists)")
        return "7"

    monkeypatch.setattr(kubernetes, "run_tool", taken)
    engine = replace(GKE, options={"namespace": "ml"})
    with pytest.raises(UsageError) as error:
        engine.submit(IOWA)
    assert f"kubectl --context=gke --namespace=ml delete service,secret {job_name(IOWA)}" in str(error.value.hint)


def test_a_login_may_say_something_before_the_list_and_half_a_list_is_none() -> None:
    text = json.dumps({"items": [job()]})
    assert [one.unit for one in read_jobs(f"Welcome to lab\n{text}", RUN, "kubernetes/gke")] == ["iowa"]
    for half in (text[:-1], "", "[]", "{}"):
        with pytest.raises(TryAgainError, match="kubectl printed no list"):
            read_jobs(half, RUN, "kubernetes/gke")


def test_a_job_of_a_queue_waits_there() -> None:
    own = job(suspend=True)
    own["metadata"]["labels"] = {**own["metadata"]["labels"], "kueue.x-k8s.io/queue-name": "spot"}
    (found,) = read_jobs(json.dumps({"items": [own]}), RUN, "kubernetes/gke")
    assert (found.state, found.why) == ("QUEUED", "Suspended: it waits in queue spot")


def test_each_job_has_its_own_pods_and_other_runs_have_theirs() -> None:
    foreign = job(unit="ohio")
    foreign["metadata"]["annotations"] = {"diloco/run-url": "gs://other/runs/nano"}
    items = [job(), job(unit="rhine"), foreign, pod("Running", unit="rhine"), OOM]
    found = read_jobs(json.dumps({"items": items}), RUN, "kubernetes/gke")
    assert [(one.unit, one.state) for one in found] == [("iowa", "QUEUED"), ("rhine", "RUNNING")]
    said = read_jobs(json.dumps({"items": [job()]}), RUN, "k", {job_name(IOWA): "FailedCreate: exceeded quota\x1b[1m"})
    assert said[0].why == "FailedCreate: exceeded quota\\x1b[1m"
