"""A small Kubernetes on this machine: what kubectl needs of an API server for Jobs, Pods, Services, Secrets and Events,
and a controller for which a pod is a local process. python -m tests.end_to_end.fake_kubernetes FOLDER CPUS

As a real one it validates strictly, and has Indexed Jobs, backoffLimit, podFailurePolicy, podReplacementPolicy,
evictions, grace, owners, foreground deletion, Pending without room, logs and watches. Of an image only its name counts:
one that begins with "missing" cannot be pulled. In namespace "forbidden" nothing may be done, in "full" a quota allows
no Job, in "tight" no pod. The names of a Service's pods are those of this machine. It listens on loopback only.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
from aiohttp import web

VERSION = "1.37"
KINDS = {
    ("v1", "pods"): "Pod", ("v1", "services"): "Service", ("v1", "secrets"): "Secret", ("v1", "events"): "Event",
    ("batch/v1", "jobs"): "Job",
}  # fmt: skip
NAMESPACES = ("default", "forbidden", "full", "tight")
INDEX = "batch.kubernetes.io/job-completion-index"
LOOP_S = 0.1
Key = tuple[str, str, str, str]  # group and version, plural, namespace, name


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def problem(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
    return web.json_response({**body, "code": code}, status=code)


def matches(thing: Any, query: Any) -> bool:
    labels, flat = thing["metadata"].get("labels", {}), {"metadata.name": thing["metadata"]["name"]}
    if thing["kind"] == "Event":
        flat |= {"involvedObject.kind": thing["involvedObject"]["kind"], "reason": thing["reason"]}
    terms = [(labels, term) for term in query.get("labelSelector", "").split(",")]
    terms += [(flat, term) for term in query.get("fieldSelector", "").split(",")]
    return all(have.get(term.partition("=")[0]) == term.partition("=")[2] for have, term in terms if term)


def lives(pod: Any) -> bool:
    return pod["status"]["phase"] in ("Pending", "Running")


class FakeCluster:
    """Its objects, and who watches them."""

    def __init__(self, folder: Path, cpus: float) -> None:
        self.folder, self.cpus = folder, cpus
        self.objects: dict[Key, Any] = {}
        self.watchers: list[tuple[Callable[[Any], bool], asyncio.Queue[Any]]] = []
        self.processes: dict[str, asyncio.subprocess.Process] = {}  # by a pod's uid
        self.environments: dict[str, dict[str, str]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.version = 1

    def tell(self, kind: str, thing: Any) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        for want, queue in self.watchers:
            if want(thing):
                queue.put_nowait({"type": kind, "object": copy.deepcopy(thing)})

    def make(self, gv: str, plural: str, thing: Any, namespace: str) -> Any:
        meta = thing["metadata"]
        meta |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        thing.setdefault("status", {})
        self.objects[gv, plural, namespace, meta["name"]] = thing
        self.tell("ADDED", thing)
        return thing

    def remove(self, key: Key) -> None:
        """And what it owns."""
        thing = self.objects.pop(key, None)
        if thing is not None:
            self.tell("DELETED", thing)
            for other, owned in self.owned(thing):
                self.end_pod(owned) if other[1] == "pods" else self.remove(other)

    def owned(self, owner: Any) -> list[tuple[Key, Any]]:
        uid = owner["metadata"]["uid"]
        everything = list(self.objects.items())
        return [(k, o) for k, o in everything if uid in {r["uid"] for r in o["metadata"].get("ownerReferences", [])}]

    def pods_of(self, job: Any) -> list[Any]:
        return [thing for key, thing in self.owned(job) if key[1] == "pods"]

    # pods

    def new_pod(self, job: Any, index: int) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        if meta["namespace"] == "tight":
            if "refused" not in meta:
                meta["refused"] = True
                about = {"kind": "Job", "name": meta["name"], "namespace": "tight"}
                said = 'Error creating: pods "x" is forbidden: exceeded quota: few, requested: pods=1, used: pods=0'
                event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": meta["name"]}}
                self.make(
                    "v1",
                    "events",
                    {**event, "involvedObject": about, "reason": "FailedCreate", "message": said},
                    "tight",
                )
            return
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": meta["name"]}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        about = {
            "name": f"{meta['name']}-{index}-{uuid.uuid4().hex[:5]}",
            "labels": labels,
            "annotations": {**template["metadata"].get("annotations", {}), INDEX: str(index)},
            "ownerReferences": [owner],
        }
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        unscheduled["message"] = "0/1 nodes are available: 1 Insufficient cpu."
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": copy.deepcopy(template["spec"])}
        pod["status"] = {"phase": "Pending", "conditions": [unscheduled]}
        self.make("v1", "pods", pod, meta["namespace"])

    def set_state(self, pod: Any, phase: str, **state: Any) -> None:
        name = pod["spec"]["containers"][0]["name"]
        pod["status"] |= {"phase": phase, "containerStatuses": [{"name": name, "state": state}]}
        self.tell("MODIFIED", pod)

    async def start(self, pod: Any) -> None:
        container, meta = pod["spec"]["containers"][0], pod["metadata"]
        index = meta["annotations"][INDEX]
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(self.folder)}
        environment |= {"JOB_COMPLETION_INDEX": index, "TMPDIR": str(self.folder / meta["name"])}
        (self.folder / meta["name"]).mkdir(exist_ok=True)
        pod["spec"]["nodeName"] = "n0"
        pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        if container["image"].startswith("missing"):
            message = f'Back-off pulling image "{container["image"]}"'
            self.set_state(pod, "Pending", waiting={"reason": "ImagePullBackOff", "message": message})
            return
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {}).get("secretKeyRef")
            secret = source and self.objects.get(("v1", "secrets", meta["namespace"], source["name"]))
            if source and secret is None:
                message = f'secret "{source["name"]}" not found'
                self.set_state(pod, "Pending", waiting={"reason": "CreateContainerConfigError", "message": message})
                return
            value = base64.b64decode(secret["data"][source["key"]]).decode() if source else entry["value"]
            environment[entry["name"]] = value
        words = [word.replace("$(JOB_COMPLETION_INDEX)", index).replace("$$", "$") for word in container["command"]]
        service = pod["spec"].get("subdomain")
        if service is not None and ("v1", "services", meta["namespace"], service) not in self.objects:
            return
        words = [word.replace(f"={service}-0.{service}:", "=127.0.0.1:") for word in words]  # its pods' names
        log = (self.folder / f"{meta['name']}.log").open("ab")
        quiet = {"stdin": asyncio.subprocess.DEVNULL, "stdout": log, "stderr": log}
        try:
            process = await asyncio.create_subprocess_exec(*words, **quiet, env=environment, start_new_session=True)
        except OSError as error:
            ended = {"exitCode": 127, "reason": "ContainerCannotRun", "message": str(error)}
            self.set_state(pod, "Failed", terminated=ended)
            self.settle(pod)
            return
        self.processes[meta["uid"]], self.environments[meta["uid"]] = process, environment
        self.set_state(pod, "Running", running={"startedAt": now()})
        self.later(self.wait(pod, process))

    def later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def wait(self, pod: Any, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": now()}
        if code and pod["spec"]["containers"][0].get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ended["message"] = (self.folder / f"{pod['metadata']['name']}.log").read_text()[-2048:]
        self.set_state(pod, "Failed" if code else "Succeeded", terminated=ended)
        if "deletionTimestamp" in pod["metadata"]:
            self.remove(("v1", "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]))
        self.settle(pod)

    def end_pod(self, pod: Any, grace_s: float | None = None, why: str | None = None) -> None:
        meta, process = pod["metadata"], self.processes.get(pod["metadata"]["uid"])
        if why is not None:
            pod["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": why})
        if process is None or process.returncode is not None:
            self.remove(("v1", "pods", meta["namespace"], meta["name"]))
        elif "deletionTimestamp" not in meta:
            meta["deletionTimestamp"] = now()
            self.tell("MODIFIED", pod)
            grace_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            self.later(self._ending(process, grace_s))

    async def _ending(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM if grace_s else signal.SIGKILL)  # a kubelet tells the first process
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s or 1.0)
            os.killpg(process.pid, signal.SIGKILL)

    # jobs

    def settle(self, pod: Any) -> None:
        """What a pod's end means for its Job."""
        uid = pod["metadata"]["ownerReferences"][0]["uid"]
        job = next((thing for thing in self.objects.values() if thing["metadata"]["uid"] == uid), None)
        if job is None or pod["metadata"].get("counted"):
            return
        pod["metadata"]["counted"] = True
        status, spec = job["status"], job["spec"]
        if pod["status"]["phase"] == "Succeeded":
            status["succeeded"] = status.get("succeeded", 0) + 1
            if status["succeeded"] >= spec["completions"]:
                self.finish(job, "Complete", "CompletionsReached", "")
        else:
            self._fail(job, pod)
        self.tell("MODIFIED", job)

    def _fail(self, job: Any, pod: Any) -> None:
        code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
        held = {one["type"] for one in pod["status"]["conditions"] if one["status"] == "True"}
        for rule in job["spec"]["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            by_code = codes and (code in codes["values"]) == (codes["operator"] == "In")
            if by_code or {one["type"] for one in rule.get("onPodConditions", [])} & held:
                if rule["action"] == "FailJob":
                    said = f"Container unit for pod {pod['metadata']['name']} failed with exit code {code}"
                    self.finish(job, "Failed", "PodFailurePolicy", f"{said} matching FailJob rule")
                return
        job["status"]["failed"] = job["status"].get("failed", 0) + 1
        if job["status"]["failed"] > job["spec"]["backoffLimit"]:
            self.finish(job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")

    def finish(self, job: Any, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"].setdefault("conditions", []).append(condition)
        for pod in self.pods_of(job):
            if lives(pod):
                self.end_pod(pod)

    async def control(self) -> None:
        while True:
            for key, job in list(self.objects.items()):
                if key[1] != "jobs":
                    continue
                pods = self.pods_of(job)
                if "deletionTimestamp" in job["metadata"]:
                    for pod in pods:
                        self.end_pod(pod)
                    if not self.pods_of(job):
                        self.remove(key)
                elif not job["status"].get("conditions"):
                    has = {pod["metadata"]["annotations"][INDEX] for pod in pods if pod["status"]["phase"] != "Failed"}
                    for index in range(job["spec"]["completions"]):
                        if str(index) not in has:
                            self.new_pod(job, index)
            await self._schedule()
            await asyncio.sleep(LOOP_S)

    async def _schedule(self) -> None:
        pods = [thing for key, thing in list(self.objects.items()) if key[1] == "pods"]
        cpus = {id(pod): float(pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]) for pod in pods}
        used = sum(cpus[id(pod)] for pod in pods if pod["status"]["phase"] == "Running")
        for pod in pods:
            if pod["status"]["phase"] == "Pending" and used + cpus[id(pod)] <= self.cpus:
                used += cpus[id(pod)]
                await self.start(pod)


# the API


def resources(gv: str) -> Any:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    found = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for (group, plural), kind in KINDS.items()
        if group == gv
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": gv, "resources": found}


def openapi(gv: str) -> Any:
    """So much that kubectl leaves the checks to the server."""
    group, _, version = gv.rpartition("/")
    paths = {}
    for (g, plural), kind in KINDS.items():
        if g == gv:
            of = {"group": group, "version": version, "kind": kind}
            verb = {"x-kubernetes-group-version-kind": of, "parameters": [{"name": "fieldValidation", "in": "query"}]}
            root = "apis" if group else "api"
            paths[f"/{root}/{gv}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": verb}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": VERSION}, "paths": paths}


def discovery(path: str) -> Any:
    batch = {"groupVersion": "batch/v1", "version": "v1"}
    root = {"v1": "api/v1", "batch/v1": "apis/batch/v1"}
    known: dict[str, Any] = {
        "version": {"major": "1", "minor": "37", "gitVersion": f"v{VERSION}.0"},
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": "batch", "versions": [batch], "preferredVersion": batch}],
        },
        "openapi/v3": {"paths": {at: {"serverRelativeURL": f"/openapi/v3/{at}"} for at in root.values()}},
    }
    for gv, at in root.items():
        known |= {at: resources(gv), f"openapi/v3/{at}": openapi(gv)}
    return known.get(path)


class ApiServer:
    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if (found := discovery(path)) is not None:
            return web.json_response(found)
        root, _, rest = path.partition("/namespaces/")
        gv = root.partition("/")[2]
        namespace, plural, name, sub = [*rest.split("/"), *[""] * 3][:4]
        if (gv, plural) not in KINDS:
            return problem(404, "NotFound", f"the server could not find the requested resource: /{path}")
        what = f"{plural}{'.batch' if gv == 'batch/v1' else ''}"
        if namespace == "forbidden":
            said = f'{what} is forbidden: User "u" cannot do this in API group "" in the namespace "forbidden"'
            return problem(403, "Forbidden", said)
        if not name:
            if request.method == "GET":
                return await self._list(request, gv, plural, namespace)
            return self._create(await request.json(), request, (gv, plural, namespace))
        thing = self.cluster.objects.get((gv, plural, namespace, name))
        if thing is None:
            return problem(404, "NotFound", f'{what} "{name}" not found')
        if sub == "log":
            return await self._log(request, thing)
        if sub == "exec":
            return await self._exec(request, self.cluster.environments[thing["metadata"]["uid"]])
        if sub == "eviction":
            self.cluster.end_pod(thing, why="EvictionByEvictionAPI")
        elif request.method == "DELETE":
            self._delete((gv, plural, namespace, name), thing, await request.text())
        elif request.method == "GET":
            return web.json_response(thing)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _create(self, thing: Any, request: web.Request, place: tuple[str, str, str]) -> web.Response:
        (gv, plural, namespace), kind = place, thing["kind"]
        name = thing["metadata"]["name"]
        try:
            kubernetes_validate.validate(thing, VERSION, strict=True)
        except Exception as error:
            where = ".".join(str(part) for part in getattr(error, "path", []))
            said = f"strict decoding error: {where}: {getattr(error, 'message', error)}"
            return problem(400, "BadRequest", f'{kind} in version "{gv}" cannot be handled as a {kind}: {said}')
        if namespace not in NAMESPACES:
            return problem(404, "NotFound", f'namespaces "{namespace}" not found')
        if namespace == "full" and kind == "Job":
            said = "exceeded quota: few, requested: count/jobs.batch=1, used: count/jobs.batch=4, limited: 4"
            return problem(403, "Forbidden", f'jobs.batch "{name}" is forbidden: {said}')
        if (gv, plural, namespace, name) in self.cluster.objects:
            return problem(409, "AlreadyExists", f'{plural}.batch "{name}" already exists')
        if request.query.get("dryRun"):
            return web.json_response(thing, status=201)
        return web.json_response(self.cluster.make(gv, plural, thing, namespace), status=201)

    def _delete(self, key: Key, thing: Any, text: str) -> None:
        options = json.loads(text) if text else {}
        if key[1] == "pods":
            self.cluster.end_pod(thing, options.get("gracePeriodSeconds"))
        elif options.get("propagationPolicy") == "Foreground":
            thing["metadata"]["deletionTimestamp"] = now()
            self.cluster.tell("MODIFIED", thing)
        else:
            self.cluster.remove(key)

    async def _list(self, request: web.Request, gv: str, plural: str, namespace: str) -> web.StreamResponse:
        def wanted(thing: Any) -> bool:
            own = thing["kind"] == KINDS[gv, plural] and thing["metadata"]["namespace"] == namespace
            return own and matches(thing, request.query)

        found = [thing for thing in self.cluster.objects.values() if wanted(thing)]
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, wanted, found, gv, KINDS[gv, plural])
        head = {"kind": f"{KINDS[gv, plural]}List", "apiVersion": gv}
        return web.json_response({**head, "metadata": {"resourceVersion": str(self.cluster.version)}, "items": found})

    async def _watch(
        self, request: web.Request, wanted: Callable[[Any], bool], first: list[Any], gv: str, kind: str
    ) -> web.StreamResponse:
        answer, queue = web.StreamResponse(headers={"Content-Type": "application/json"}), asyncio.Queue[Any]()
        entry = (wanted, queue)
        self.cluster.watchers.append(entry)
        try:
            await answer.prepare(request)
            begins = request.query.get("sendInitialEvents") == "true"
            for thing in first if begins or "resourceVersion" not in request.query else []:
                queue.put_nowait({"type": "ADDED", "object": thing})
            if begins:
                meta = {"resourceVersion": str(self.cluster.version)}
                meta["annotations"] = {"k8s.io/initial-events-end": "true"}
                queue.put_nowait({"type": "BOOKMARK", "object": {"kind": kind, "apiVersion": gv, "metadata": meta}})
            with suppress(ConnectionError):  # until it has seen enough
                while True:
                    await answer.write(json.dumps(await queue.get()).encode() + b"\n")
        finally:
            self.cluster.watchers.remove(entry)
        return answer

    async def _exec(self, request: web.Request, environment: dict[str, str]) -> web.WebSocketResponse:
        """Channels of v5.channel.k8s.io: 1 is stdout, 2 stderr, 3 how it ended."""
        answer = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await answer.prepare(request)
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*request.query.getall("command"), **pipes, env=environment)
        for channel, text in enumerate(await process.communicate(), 1):
            await answer.send_bytes(bytes([channel]) + text)
        end: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if process.returncode:
            causes = [{"reason": "ExitCode", "message": str(process.returncode)}]
            said = f"command terminated with non-zero exit code: exit status {process.returncode}"
            end |= {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}, "message": said}
        await answer.send_bytes(b"\x03" + json.dumps(end).encode())
        await answer.close()
        return answer

    async def _log(self, request: web.Request, pod: Any) -> web.StreamResponse:
        answer, path = web.StreamResponse(), self.cluster.folder / f"{pod['metadata']['name']}.log"
        await answer.prepare(request)
        with (path if path.exists() else Path(os.devnull)).open("rb") as file:
            lines = file.readlines()
            await answer.write(b"".join(lines[-int(request.query.get("tailLines", len(lines) or 1)) :]))
            while request.query.get("follow") == "true" and lives(pod):
                await asyncio.sleep(LOOP_S)
                await answer.write(file.read())
        return answer


async def main(folder: Path, cpus: float) -> None:
    cluster = FakeCluster(folder, cpus)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{tail:.*}", ApiServer(cluster).serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = asyncio.ensure_future(cluster.control())
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), task.cancel)  # it ends with its stdin
    print(runner.addresses[0][1], flush=True)
    try:
        with suppress(asyncio.CancelledError):
            await task
    finally:
        for process in cluster.processes.values():
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
