"""Kubernetes, by the user's kubectl and one of its contexts: a unit is an Indexed Job, with a pod for each node.

A pod that the cluster takes away (DisruptionTarget) is replaced, and counts for nothing. One that crashes, or that a
person deletes, is replaced and counts; one that cannot go on fails its Job. A Job's name is the lock by which a unit
that is submitted twice has one Job; its Service and its Secret are its own, and go when it goes.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import yaml

from diloco_cli.clock import monotonic_s
from diloco_cli.digests import digest, short_digest
from diloco_cli.engines.port import AGAIN_STATUS, OVER, Job, JobSpec, JobState, LogCommands, of_each_unit
from diloco_cli.engines.tool import run_tool
from diloco_cli.errors import DilocoError, RefusedError, TryAgainError, UsageError, escaped
from diloco_cli.runtime.units import JOB_ENDS_S
from diloco_cli.signing import KEY_VARIABLE

SUBMITS_WITHIN_S = 30.0
ANSWERS_WITHIN_S = 15.0
LEAVES_WITHIN_S = JOB_ENDS_S + 20.0
GRACE_S = int(JOB_ENDS_S) + 2
MAX_RETRIES = 100  # crashes, and pods that a person deletes; Kubernetes waits up to six minutes between them
KEPT_S = 7 * 86_400  # a Job that is over, with what it has logged
LEAST_CPU = 0.25  # of a syncer: room beside a learner that takes the node's other cores
PORT = 29_400  # each pod has an address of its own
RETRIED = [AGAIN_STATUS, *range(128 + 1, 128 + 32)]  # what signals end
RUN, UNIT, RUN_URL = "diloco/run", "diloco/unit", "diloco/run-url"
QUEUE = "kueue.x-k8s.io/queue-name"
INDEX = "batch.kubernetes.io/job-completion-index"
OPTIONS = {"namespace": str, "queue": str, "pod": dict, "container": dict}
OURS = "unit"  # the container: others may be put beside it
NO_POD = "it has no pod yet"
NO_IMAGE = "IMAGE"  # in its place: who edits the text names it
MAX_SAID = 300  # characters
LAST_LINES = 3  # an error, its hint, and a line's end
MAX_PODS = 100  # whose logs are read at a time
NEEDS_A_PERSON = {
    "ErrImagePull": "the image is not there, or not for this cluster",
    "ImagePullBackOff": "the image is not there, or not for this cluster",
    "InvalidImageName": "no image has such a name",
    "ErrImageNeverPull": "the image is not on the node",
    "CreateContainerConfigError": "it waits for what is named here",
    "CreateContainerError": "it could not be started",
    "RunContainerError": "it could not be started",
}
HINTS = {
    "exceeded quota": "what is left: kubectl {place} describe quota",
    "(Forbidden)": "what you may do there: kubectl {place} auth can-i --list",
    "namespaces ": "those that are there: kubectl {place} get namespaces",
    "context ": "those that kubectl knows: kubectl config get-contexts",
}
Document = dict[str, Any]


def merged(ours: Document, given: Mapping[str, Any]) -> Document:
    """With what a site gives: mappings are merged, lists appended, null removes a key."""
    found = dict(ours)
    for key, value in given.items():
        own = found.get(key)
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping):
            found[key] = merged(own if isinstance(own, dict) else {}, value)
        else:
            found[key] = [*own, *value] if isinstance(own, list) and isinstance(value, list) else value
    return found


def job_name(spec: JobSpec) -> str:
    """As a host's name, which Indexed Jobs need: at most 63 characters with the number of a pod."""
    number = short_digest(digest(f"{spec.run} {spec.unit}".encode()))
    return f"diloco-{spec.run_name[:16].rstrip('-')}-{spec.unit[:16].rstrip('-')}-{number}"


def run_label(run: str) -> str:
    """By which the Jobs and pods of the run at this URL are found."""
    return short_digest(digest(run.encode()))


def documents(spec: JobSpec, image: str, options: Mapping[str, Any]) -> list[Document]:
    """The Job, and a Service by which several nodes find each other."""
    name = job_name(spec)
    labels = {"app.kubernetes.io/name": "diloco", RUN: run_label(spec.run), UNIT: spec.unit}
    about = {"labels": labels, "annotations": {RUN_URL: spec.run}}
    several = spec.nodes > 1
    words = [word.replace("$", "$$") for word in spec.command]  # Kubernetes puts variables in the place of $(NAME)
    if several:
        words += [f"--rendezvous={name}-0.{name}:{PORT}", "--node-rank=$(JOB_COMPLETION_INDEX)"]
    container: Document = {"name": OURS, "image": image, "command": words}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"  # `status` has its last words
    memory = {"memory": f"{spec.memory_gb}G"} if spec.memory_gb else {}  # no limit: it is planned, not measured
    cpu = spec.cores if spec.busy_cores is None else min(spec.cores, max(LEAST_CPU, round(spec.busy_cores, 2)))
    container["resources"] = {"requests": {"cpu": str(cpu), **memory}}
    pod: Document = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables named after every Service, which may begin as our own do
    }
    if spec.gpus:
        container["resources"]["limits"] = {"nvidia.com/gpu": str(spec.gpus)}
    if spec.gpus > 1:  # their ranks meet in shared memory, of which a container has 64 MB
        pod["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if spec.key is not None:
        container["env"] = [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}}]
    if several:
        pod["subdomain"] = name
    pod["containers"] = [merged(container, options.get("container", {}))]
    job: Document = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "podReplacementPolicy": "Failed",
        "backoffLimit": MAX_RETRIES,
        "ttlSecondsAfterFinished": KEPT_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": OURS, "operator": "NotIn", "values": RETRIED}},
            ]
        },
        "template": {"metadata": {"labels": labels}, "spec": merged(pod, options.get("pod", {}))},
    }
    queue = {QUEUE: options["queue"]} if "queue" in options else {}
    whole = {"name": name, **about, "labels": {**labels, **queue}}
    found = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": whole, "spec": job}]
    if several:
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        }
        found.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, **about}, "spec": service})
    return found


def _secret(spec: JobSpec, key: str) -> Document:
    metadata = {"name": job_name(spec), "labels": {RUN: run_label(spec.run), UNIT: spec.unit}}
    data = {"key": base64.b64encode(key.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def read_jobs(text: str, run: str, engine: str, refused: Mapping[str, str] = {}) -> list[Job]:
    """The Jobs of the run at this URL in the list that kubectl printed, by unit. `refused`: by Job, why it got no
    pod."""
    items = _items(text)
    pods: dict[str, list[Document]] = {}
    for item in sorted(items, key=lambda item: str(item["metadata"].get("creationTimestamp"))):
        if item["kind"] == "Pod":
            owner = item["metadata"].get("labels", {}).get("batch.kubernetes.io/job-name", "")
            pods.setdefault(owner, []).append(item)
    found = []
    for item in items:
        meta = item["metadata"]
        unit = meta.get("labels", {}).get(UNIT)
        if item["kind"] == "Job" and unit and meta.get("annotations", {}).get(RUN_URL) == run:
            name = meta["name"]
            state, why, nodes = _state_of(item, pods.get(name, []), refused.get(name, ""))
            found.append(Job(unit, engine, name, state, escaped(why)[:MAX_SAID], ",".join(nodes)))
    return of_each_unit(found)


def _items(text: str) -> list[Document]:
    """Of the list in what kubectl printed, before which a login may have said something. Raises TryAgainError if there
    is none, or half of one."""
    try:
        found: list[Document] = json.JSONDecoder().raw_decode(text, text.index("{"))[0]["items"]
    except (ValueError, LookupError, TypeError):
        raise TryAgainError(f"kubectl printed no list: {escaped(text)[:MAX_SAID]}") from None
    return found


def _state_of(job: Document, pods: Sequence[Document], refused: str) -> tuple[JobState, str, list[str]]:
    """Of a Job, why, and where its pods are. Of several nodes the one that is furthest from running counts."""
    conditions = {one["type"]: one for one in _conditions(job)}
    if (failed := conditions.get("Failed")) is not None:
        ends = [f"{word}{_last_words(pod)}" for pod in pods if (word := _end_of(pod))]
        last = ends[-1] if ends else failed.get("message", "")
        return JobState.FAILED, f"{failed.get('reason', '')}: {last}", []
    if "Complete" in conditions:
        return JobState.ENDED, "", []
    latest = {pod["metadata"].get("annotations", {}).get(INDEX, "0"): pod for pod in pods}
    nodes = sorted({node for pod in latest.values() if _lives(pod) and (node := pod["spec"].get("nodeName"))})
    if "deletionTimestamp" in job["metadata"] or conditions.keys() & {"FailureTarget", "SuccessCriteriaMet"}:
        return JobState.LEAVING, "", nodes
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        if queue:
            return JobState.QUEUED, f"Suspended: it waits in queue {queue}", nodes
        words = f'kubectl patch job {job["metadata"]["name"]} -p \'{{"spec": {{"suspend": false}}}}\''
        return JobState.HELD, f"Suspended: {words}", nodes
    states = [_state_of_pod(pod, pods) for pod in latest.values()]
    if len(latest) < job["spec"].get("completions", 1):
        states.append((JobState.QUEUED, refused or NO_POD))
    ranks = [JobState.HELD, JobState.QUEUED, JobState.STARTING, JobState.LEAVING, JobState.RUNNING]
    state, why = min(states, key=lambda one: ranks.index(one[0]))
    return state, why, nodes


def _state_of_pod(pod: Document, all_pods: Sequence[Document]) -> tuple[JobState, str]:
    if not _lives(pod):
        ended = pod["status"].get("phase") == "Succeeded"
        return (JobState.LEAVING, "") if ended else (JobState.QUEUED, f"{_end_of(pod)}; another pod follows")
    if "deletionTimestamp" in pod["metadata"]:
        return JobState.LEAVING, _disruption(pod)
    before = [word for other in all_pods if _node_rank(other) == _node_rank(pod) and (word := _end_of(other))]
    again = f"again, after: {before[-1]}" if before else ""
    if pod["status"].get("phase") == "Running":
        return JobState.RUNNING, again
    waiting = _container(pod).get("waiting", {})
    if (reason := waiting.get("reason", "")) in NEEDS_A_PERSON:
        return JobState.HELD, f"{reason}: {NEEDS_A_PERSON[reason]}: {waiting.get('message', '')}"
    for one in _conditions(pod):
        if one["type"] == "PodScheduled" and one.get("status") == "False":
            return JobState.QUEUED, f"{one.get('reason', '')}: {one.get('message', '')}"
    return JobState.STARTING, reason or again


def _lives(pod: Document) -> bool:
    return pod["status"].get("phase") not in ("Failed", "Succeeded")


def _end_of(pod: Document) -> str:
    """How a pod failed, in Kubernetes' words; "" if it has not."""
    status, ended = pod["status"], _container(pod).get("terminated", {})
    if status.get("phase") != "Failed":
        return ""
    code, reason = ended.get("exitCode"), status.get("reason") or _disruption(pod) or ended.get("reason", "")
    words = ["" if reason == "Error" else reason, f"exit code {code}" if code is not None else ""]
    return ", ".join([*filter(None, words), *filter(None, [status.get("message", "")])]) or "Failed"


def _last_words(pod: Document) -> str:
    """The end of its log, or why it could not be started: an image may be without `diloco`, or have another one."""
    said = _container(pod).get("terminated", {}).get("message", "")
    return "".join(f"; {line.strip()}" for line in said.split("\n")[-LAST_LINES:] if line.strip())


def _disruption(pod: Document) -> str:
    return next((one.get("reason", "") for one in _conditions(pod) if one["type"] == "DisruptionTarget"), "")


def _container(pod: Document) -> Document:
    """The state of its only container that is ours."""
    states = [one.get("state", {}) for one in pod["status"].get("containerStatuses", []) if one.get("name") == OURS]
    return states[0] if states else {}


def _conditions(thing: Document) -> list[Document]:
    """Those that hold, and whether a pod is scheduled."""
    found: list[Document] = thing.get("status", {}).get("conditions", [])
    return [one for one in found if one.get("status") == "True" or one["type"] == "PodScheduled"]


def _node_rank(pod: Document) -> str:
    return str(pod["metadata"].get("annotations", {}).get(INDEX, "0"))


@dataclass(frozen=True)
class Kubernetes:
    """`name`: as `infra` says; `options`: namespace, queue (of Kueue), and what is merged into the pod and into its
    container (pod, container), as Kubernetes names it."""

    name: str
    context: str
    image: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sees_files = False
    cluster = ""
    may_change = re.compile(r"\s*(image|requests|limits): ")

    def render(self, spec: JobSpec) -> str:
        return yaml.safe_dump_all(
            self._documents(spec), sort_keys=False, explicit_start=True, default_flow_style=None, width=2**16
        )

    def check(self, spec: JobSpec) -> None:
        with suppress(_TakenError):
            self._create(spec, self._checked(spec), "--dry-run=server", "--output=name")

    def make_ready(self, tell: Callable[[str], None]) -> None:
        """Its image has all that its pods need."""

    def submit(self, spec: JobSpec, key: str | None = None) -> Job:
        job, *others = self._checked(spec)
        try:
            uid = self._create(spec, [job], "--output=jsonpath={.metadata.uid}")
        except _TakenError:
            known = {job.id: job for job in self.jobs(spec.run, spec.run_name)}.get(job_name(spec))
            if known is not None and known.state not in (*OVER, JobState.LEAVING):
                return known
            words = ("delete", "job", job_name(spec), "--cascade=foreground", "--ignore-not-found")
            self._kubectl(*words, f"--timeout={LEAVES_WITHIN_S:.0f}s", within_s=LEAVES_WITHIN_S + 5.0)
            uid = self._create(spec, [job], "--output=jsonpath={.metadata.uid}")
        owner: Document = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": job_name(spec),
            "uid": uid.rpartition("\n")[2],
        }
        owner["blockOwnerDeletion"] = True  # the Job is gone when they are: the next one's have the same names
        for other in [*others, *([] if key is None else [_secret(spec, key)])]:
            own = {**other, "metadata": {**other["metadata"], "ownerReferences": [owner]}}
            self._create(spec, [own], "--output=name")
        return Job(spec.unit, self.name, job_name(spec), JobState.QUEUED, "submitted")

    def jobs(self, run: str, run_name: str, within_s: float = ANSWERS_WITHIN_S) -> list[Job]:
        words, asked_s = ("get", "jobs,pods", f"--selector={RUN}={run_label(run)}", "--output=json"), monotonic_s()
        text = self._kubectl(*words, within_s=within_s)
        found, left_s = read_jobs(text, run, self.name), within_s + asked_s - monotonic_s()
        if any(job.why == NO_POD for job in found):
            with suppress(DilocoError):  # who may not see events, or has no time left, sees no reason
                found = read_jobs(text, run, self.name, self._refused(left_s))
        return found

    def cancel(self, jobs: Collection[Job]) -> None:
        """As a stop of the unit: its pods are told, and have their grace."""
        if jobs:
            words = ("delete", "job", *(job.id for job in jobs), "--cascade=foreground", "--wait=false")
            self._kubectl(*words, "--ignore-not-found", within_s=SUBMITS_WITHIN_S)

    def hasten(self, jobs: Collection[Job]) -> None:
        """Nothing is held back for long."""

    def preempt(self, job: Job) -> None:
        """Evict its pods, as a node that is drained does."""
        for pod in self._pods(job):
            meta = {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]}
            eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/eviction"
            words = ("create", f"--raw={path}", "--filename=-")
            self._kubectl(*words, given=eviction, within_s=ANSWERS_WITHIN_S, refusal=RefusedError)

    def run_in(self, job: Job, words: Sequence[str], within_s: float) -> str:
        first = next((pod["metadata"]["name"] for pod in self._pods(job) if _node_rank(pod) == "0"), None)
        if first is None:
            raise RefusedError(f"{job.unit} has no pod that runs")
        given = ("exec", first, f"--container={OURS}", "--", *words)
        return self._kubectl(*given, within_s=within_s, refusal=RefusedError)

    def log_words(self, run: str, run_name: str, units: Sequence[str], lines: int, follow: bool) -> LogCommands:
        """Also of pods that have ended, while they are there."""
        words = [f"--tail={lines}", f"--container={OURS}", f"--max-log-requests={MAX_PODS}", "--ignore-errors"]
        words += ["--follow"] if follow else []
        found: LogCommands = {}
        for unit in units:
            chosen = f"--selector={RUN}={run_label(run)},{UNIT}={unit}"
            found[unit,] = ("kubectl", *self._place, "logs", chosen, *words)
        return found

    def _pods(self, job: Job) -> list[Document]:
        """Those that run."""
        words = ("get", "pods", f"--selector=batch.kubernetes.io/job-name={job.id}", "--output=json")
        found = _items(self._kubectl(*words, within_s=ANSWERS_WITHIN_S))
        return [pod for pod in found if pod["status"].get("phase") == "Running"]

    def _documents(self, spec: JobSpec) -> list[Document]:
        for key, value in self.options.items():
            if not isinstance(value, OPTIONS.get(key, ())):
                allowed = ", ".join(f"{name} ({kind.__name__})" for name, kind in OPTIONS.items())
                raise UsageError(f"{key!a} is none of {allowed}", where=f"options of {self.name}")
        return documents(spec, self.image or NO_IMAGE, self.options)

    def _checked(self, spec: JobSpec) -> list[Document]:
        """What is handed over. Raises UsageError for what no pod could run."""
        found = self._documents(spec)
        try:
            if spec.text is not None:
                found = [one for one in yaml.safe_load_all(spec.text) if one]
            container = found[0]["spec"]["template"]["spec"]["containers"][0]
            image = container["image"]
            mounted = [PurePath(one["mountPath"]) for one in container.get("volumeMounts", [])]
        except (yaml.YAMLError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"this is no Job: {error}", where=spec.unit) from None
        if image == NO_IMAGE:
            place = self.name.partition("/")[2]
            hint = f"in the inventory: sites: {{{place}: {{engine: kubernetes, image: IMAGE}}}}"
            raise UsageError(f"{self.name} has no image for its pods", where=spec.unit, hint=hint)
        for word in (spec.run, *spec.command):
            path = word.partition("file://")[2]
            if path and not any(PurePath(path).is_relative_to(place) for place in mounted):
                raise UsageError(
                    f"pods do not see the folder {path}",
                    where=spec.unit,
                    hint="store: {url: gs://...}, s3:// or az://; or mount a volume there: options: {pod: {volumes:"
                    " [...]}, container: {volumeMounts: [...]}}",
                )
        return found

    def _create(self, spec: JobSpec, things: list[Document], *options: str) -> str:
        given = "\n".join(json.dumps(thing) for thing in things)
        words = ("create", "--filename=-", "--validate=strict", *options)
        try:
            return self._kubectl(*words, given=given, within_s=SUBMITS_WITHIN_S, refusal=UsageError)
        except UsageError as error:
            if "(AlreadyExists)" in error.message:
                typed = shlex.join((*self._place, "delete", "service,secret", job_name(spec)))
                mend = f"what has lost its Job: kubectl {typed}"
                raise _TakenError(error.message, where=spec.unit, hint=mend) from None
            error.where = error.where or f"{spec.unit} ({self.name})"
            hint = next((text for word, text in HINTS.items() if word in error.message), None)
            hint = "what is submitted: diloco launch -n" if hint is None else hint.format(place=shlex.join(self._place))
            error.hint = error.hint or hint
            raise

    def _refused(self, within_s: float) -> dict[str, str]:
        """By Job, why it got no pod: a quota, a policy."""
        selector = "--field-selector=involvedObject.kind=Job,reason=FailedCreate"
        events = _items(self._kubectl("get", "events", selector, "--output=json", within_s=within_s))
        return {one["involvedObject"]["name"]: f"FailedCreate: {one.get('message', '')}" for one in events}

    def _kubectl(
        self, *words: str, given: str = "", within_s: float, refusal: type[DilocoError] = TryAgainError
    ) -> str:
        called = ("kubectl", *self._place, *words)
        return run_tool(called, given, within_s=within_s, refusal=refusal)

    @property
    def _place(self) -> list[str]:
        namespace = [f"--namespace={self.options['namespace']}"] if "namespace" in self.options else []
        return [f"--context={self.context}", *namespace]


class _TakenError(UsageError):
    """There is one of that name."""
