"""Every parser of bytes or text that come from outside, with honest inputs to begin from.

A parser takes bytes and may answer anything, or raise one of its declared errors. Nothing else is allowed to come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from diloco_cli.chaos.actions import read_entries
from diloco_cli.cli.output import print_json
from diloco_cli.config.codec import from_plain, replace, to_plain
from diloco_cli.config.fields import Node
from diloco_cli.config.hardware import expand_hostlist
from diloco_cli.config.huggingface import facts_of_config, read_config
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import apply_overrides, load_run
from diloco_cli.config.settings import InnerSettings
from diloco_cli.digests import digest, is_digest
from diloco_cli.errors import DilocoError
from diloco_cli.faults import load_scenario
from diloco_cli.methods import CODECS
from diloco_cli.observe.facts import Heard, RunFacts
from diloco_cli.observe.screen import plain_line, status_text
from diloco_cli.observe.status import status_of
from diloco_cli.paths import read_json
from diloco_cli.plan.plan import load_plan, plan_from_text, plan_to_text
from diloco_cli.plan.planner import make_plan
from diloco_cli.protocol.log.commit_log import HeadHint, Snapshot, fold, parse_format
from diloco_cli.protocol.log.heartbeats import LearnerHeartbeat, SyncerHeartbeat
from diloco_cli.protocol.log.keys import is_name, read_inner_key
from diloco_cli.protocol.log.records import Offer, ProcessClaim, Request, decode, encode
from diloco_cli.protocol.log.state import RunState
from diloco_cli.protocol.rules.merging import is_well_formed, refusal
from diloco_cli.quantities import parse_bandwidth, parse_count, parse_duration, parse_egress, parse_price
from diloco_cli.runtime.processes import Identity
from diloco_cli.signing import Secret
from diloco_cli.store.gcs import GCSStore
from diloco_cli.store.port import check_key, check_prefix
from diloco_cli.store.url import normalise_store_url, parse_url
from diloco_cli.syncer.arithmetic import TorchArithmetic, state_spec
from diloco_cli.syncer.evaluation import read_answer
from diloco_cli.tensors.codecs import codec
from diloco_cli.tensors.merge import delta_formats
from diloco_cli.training.inner import restore_inner_state
from tests.unit.plan.fleets import HOME, IOWA, MODEL, fleet
from tests.unit.plan.fleets import RUN as PLANNED_RUN
from tests.unit.protocol.records import RUN, applied, commit, genesis, offer, output

ROOT = Path(__file__).resolve().parents[2]
Parse = Callable[[bytes], Any]


@dataclass(frozen=True)
class Parser:
    name: str
    parse: Parse
    seeds: tuple[bytes, ...]
    declared: tuple[type[Exception], ...] = (DilocoError,)


def _records() -> list[Parser]:
    state = genesis()
    claim = ProcessClaim(1, "n" * 32, "host", 4711, "2026-01-01T00:00:00.000Z", "0.2.0")
    honest = replace(offer(state), payload_digest=digest(b"payload"))
    merge = commit(
        state, "merge", slot=0, inputs=(applied(),), outputs=(output(0, state.n + 1, 0),), alive=2, tokens=8, quorum=1
    )  # fmt: skip
    commits = (merge, commit(state, "epoch_start", epoch=2), commit(state, "skip", slot=0), commit(state, "finish"))
    heartbeat = LearnerHeartbeat("TRAINING", 1, 3, 100, 4096, 812.5, 0, loss=2.5)
    simple: dict[type, object] = {
        ProcessClaim: claim,
        HeadHint: HeadHint(64),
        Snapshot: Snapshot(state, "blake3-" + "0" * 64, RUN.run_id),
        LearnerHeartbeat: heartbeat,
        SyncerHeartbeat: SyncerHeartbeat("MERGING", 1, 3, "host"),
        Request: Request(0, "stop", "n", "t", "enough"),
    }
    own = Secret("0123456789abcdef0123456789abcdef", "TEST").certified(RUN.run_id, {"learner/l0": "a1" * 32})
    signing = Secret(own, "TEST").keyring(RUN.run_id)
    signed = signing.sign("learner/l0", "k", encode(honest))
    return [
        Parser("signed record", lambda data: signing.authenticates("learner/l0", "k", data), (signed,)),
        Parser("FORMAT.json", lambda data: parse_format(data, "u"), (encode(RUN),)),
        Parser("offer", lambda data: _judged(decode(Offer, data, "k"), state), (encode(honest),)),
        Parser("commit", lambda data: fold(RUN, state, data), tuple(map(encode, commits))),
        *(
            Parser(kind.__name__.lower(), _decoder(kind), (encode(example),))
            for kind, example in simple.items()
        ),
    ]  # fmt: skip


def _screens() -> list[Parser]:
    """What a stranger's heartbeat and commit come to on `diloco status`, as text and as JSON."""
    state = genesis()
    skip = encode(commit(state, "skip", slot=0, reason="nobody offered", time="2026-01-01T00:00:00.000Z"))
    heartbeat = LearnerHeartbeat("TRAINING", 1, 3, 100, 4096, 812.5, 0, loss=2.5, up_bytes=10, note="fine")

    def shown(state: RunState, heartbeat: LearnerHeartbeat) -> None:
        facts = RunFacts("u", RUN, state, {"l0": Heard(heartbeat, 1.0)}, None, 1_800_000_000.0)
        status = status_of(facts)
        with redirect_stdout(StringIO()) as printed:
            print_json("status", to_plain(status))
        screen = status_text(status) + plain_line(status) + printed.getvalue()
        assert all(character.isprintable() or character == "\n" for character in screen), "a control character"

    return [
        Parser("status of a commit", lambda data: shown(fold(RUN, state, data), heartbeat), (skip,)),
        Parser(
            "status of a heartbeat",
            lambda data: shown(state, decode(LearnerHeartbeat, data, "k")),
            (encode(heartbeat),),
        ),
    ]


def _decoder(kind: type) -> Parse:
    return lambda data: decode(kind, data, "k")


def _judged(found: Offer, state: RunState) -> str | None:
    return refusal(found, state, RUN) if is_well_formed(found) else "bad_record"


def _payloads() -> list[Parser]:
    values = torch.linspace(-1, 1, 300)
    parsers = [
        Parser(f"weights {name}", _weights_reader(name), (codec(name).to_bytes(values),)) for name in CODECS
    ]  # fmt: skip
    for name in CODECS:
        run = replace(RUN, settings=replace(RUN.settings, sync=replace(RUN.settings.sync, codec=name)))
        arithmetic = TorchArithmetic(run)
        size = run.layout.fragments[0].num_parameters
        arithmetic.restore(0, "s", _state_bytes(size))
        payload = delta_formats(run.layout, run.settings.sync)[0].encode(torch.ones(size))
        read = _delta_reader(arithmetic, offer(genesis(run), fragment=0))
        parsers.append(Parser(f"delta {name}", read, (payload, _with_norms(payload))))
    arithmetic = TorchArithmetic(RUN)
    size = RUN.layout.fragments[0].num_parameters
    parsers.append(Parser("state", lambda data: arithmetic.restore(0, "s", data), (_state_bytes(size),)))
    parsers.append(_moments())
    return parsers


def _weights_reader(name: str) -> Parse:
    return lambda data: codec(name).from_bytes(data, 300)


def _delta_reader(arithmetic: TorchArithmetic, found: Offer) -> Parse:
    return lambda data: arithmetic.read_delta(found, data, None)


def _with_norms(payload: bytes) -> bytes:
    """The same with a header that lies about its length."""
    return (len(payload) * 2).to_bytes(8, "little") + payload[8:]


def _state_bytes(size: int) -> bytes:
    from diloco_cli.tensors.payload import to_bytes

    return to_bytes(
        {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in state_spec(size, "nesterov").items()}
    )


def _moments() -> Parser:
    from diloco_cli.training.inner import build_optimizer, saved_moments

    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, InnerSettings())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = saved_moments(model, optimizer)
    assert saved is not None
    return Parser("moments", lambda data: restore_inner_state(model, optimizer, data), (saved.encode(),))


def _files(folder: Path) -> list[Parser]:
    def of_file(load: Callable[[Path], Any], name: str) -> Parse:
        path = folder / name

        def parse(data: bytes) -> Any:
            path.write_bytes(data)
            return load(path)

        return parse

    plan = plan_to_text(make_plan(PLANNED_RUN, fleet(IOWA, HOME), MODEL)).encode()
    scenarios = tuple(path.read_bytes() for path in sorted((ROOT / "templates" / "chaos").glob("*.yaml")))
    config = b'{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, ' \
             b'"intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64}'  # fmt: skip
    unit = b'{"format": 1, "name": "iowa", "identity": {"pid": 4711, "start_time": "boot:1", "token": "t"}}'
    journal = b'{"id": "a", "time": "t", "seed": 7, "fault": "kill", "target": "iowa", "pid": 4711, "for_s": 1.5}\n'
    (folder / "model").mkdir()
    return [
        Parser(
            "run.yaml", of_file(load_run, "run.yaml"),
            ((ROOT / "templates/run.yaml").read_bytes(), RUN_YAML)
        ),
        Parser(
            "inventory.yaml", of_file(load_inventory, "inventory.yaml"),
            ((ROOT / "templates/inventory.yaml").read_bytes(), INVENTORY_YAML)
        ),
        Parser("scenario.yaml", of_file(load_scenario, "scenario.yaml"), scenarios),
        Parser("plan file", of_file(load_plan, "a.plan.json"), (plan,)),
        Parser("plan file, digest renewed", _renewed_plan, (plan,)),
        Parser("config.json", of_file(_config_of, "model/config.json"), (config,)),
        Parser("unit file", of_file(_identity_of, "unit.json"), (unit,), declared=(DilocoError, ValueError)),
        Parser("chaos journal", _journal_reader(folder), (journal,)),
    ]  # fmt: skip


def _renewed_plan(data: bytes) -> Any:
    """Whoever changes a plan can compute its digest as well."""
    try:
        body = json.loads(data)
        canonical = json.dumps(body["plan"], sort_keys=True, separators=(",", ":"))
        text = json.dumps(body | {"digest": digest(canonical.encode())})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        text = data.decode("utf-8", "replace")
    return plan_from_text(text, "a.plan.json")


def _config_of(path: Path) -> Any:
    config, place = read_config(path.parent.name, [path.parent.parent])
    return facts_of_config(config, str(place))


def _identity_of(path: Path) -> Any:
    body = read_json(path)
    return None if body is None else from_plain(Identity, body.get("identity"))


def _journal_reader(folder: Path) -> Parse:
    def parse(data: bytes) -> Any:
        from diloco_cli.chaos.actions import _path

        path = _path("fuzzed")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read_entries("fuzzed")

    return parse


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _words() -> list[Parser]:
    def of_text(read: Callable[[str], Any]) -> Parse:
        return lambda data: read(_text(data))

    urls = (b"gs://bucket/prefix", b"s3://bucket/a/b", b"file:///tmp/x", b"memory://name", b"./runs", b"~/runs")
    keys = (b"offer/iowa/00000001/0000000007.json", b"inner/iowa/00000001/000000000010-blake3-00", b"FORMAT.json")
    named = {
        "bandwidth": (parse_bandwidth, (b"30 Mbps", b"2 Gbit/s", b"12.5 MB/s")),
        "duration": (parse_duration, (b"5 ms", b"6 h", b"2.5 d")),
        "count": (parse_count, (b"20B", b"524288", b"1.5M")),
        "price": (parse_price, (b"112.0/h",)),
        "egress": (parse_egress, (b"0.02/GB",)),
        "hostlist": (expand_hostlist, (b"box[1-2,7],login", b"n[08-10]", b"a,b,c")),
        "store url": (parse_url, urls),
        "store url of a file": (lambda text: normalise_store_url(text, Path("/tmp")), urls),
        "key": (check_key, keys),
        "prefix": (check_prefix, keys),
        "inner key": (read_inner_key, keys),
        "name": (is_name, (b"iowa", b"us-central1")),
        "digest": (is_digest, (digest(b"").encode(),)),
        "--set": (_overridden, (b"sync.every=40", b"train={tokens: 1B}", b"model.args.x=[1, 2]")),
    }
    return [Parser(name, of_text(read), seeds) for name, (read, seeds) in named.items()]  # type: ignore[arg-type]


def _overridden(text: str) -> Node:
    return apply_overrides(Node({}, "run.yaml:1"), [text])


class AnsweringGcs(GCSStore):
    """Every request is answered with the bytes in `body`, one page and no more."""

    body = b""

    def _client(self) -> None:
        """None: gcsfs would look for credentials on the network, for seconds."""

    async def _ask(self, method: str, path: str, *names: str, key: str, num_bytes: int = 0, **parts: Any) -> bytes:
        return b"{}" if "pageToken" in parts else self.body


def _answers() -> list[Parser]:
    store = AnsweringGcs("bucket", "runs")

    def ask(question: Callable[[], Any]) -> Parse:
        def parse(data: bytes) -> Any:
            store.body = data
            return question()

        return parse

    listing = b'{"items": [{"name": "runs/commit/000000000000.json"}, {"name": "runs/x"}], "nextPageToken": "t"}'
    about = b'{"size": "17", "updated": "2026-01-01T00:00:00.000Z"}'
    return [
        Parser("gs listing", ask(lambda: store.list("commit/")), (listing,)),
        Parser("gs object", ask(lambda: store.stat("commit/x")), (about,)),
        Parser("evaluator's line", lambda data: read_answer(_text(data)), (b'{"n": 3, "loss": 2.5}',)),
    ]


PARSERS: dict[str, Callable[[Path], list[Parser]]] = {
    "records": lambda folder: _records(),
    "screens": lambda folder: _screens(),
    "payloads": lambda folder: _payloads(),
    "files": _files,
    "words": lambda folder: _words(),
    "answers": lambda folder: _answers(),
}
"""By what they read, each of a folder: where the inputs of those go that read files."""


def all_parsers(folder: Path) -> list[Parser]:
    return [parser for parsers in PARSERS.values() for parser in parsers(folder)]


RUN_YAML = b"""version: 1
name: nano
inventory: inventory.yaml
model: {entrypoint: "pkg.module:build_model", args: {a: 1, b: [1, 2], c: {d: text}}}
data: {entrypoint: "pkg.module:build_data"}
train: {tokens: 20M, batch_tokens: 1024, inner: {name: adamw, lr: 3e-4, warmup_steps: 10, schedule: cosine}}
sync: {every: 24, fragments: 4, overlap: auto, quorum: 1, grace: {gamma: 0.5}, codec: int8, skip_after: 30 s}
outer: {name: nesterov, lr: 0.7, momentum: 0.9}
"""
INVENTORY_YAML = b"""version: 1
store: {url: gs://my-bucket/runs, region: us-central1}
regions: {us-central1: {}, europe-west4: {store: gs://my-eu-bucket/runs}}
islands:
  - name: iowa
    region: us-central1
    infra: slurm/h100
    accelerators: H100-SXM:8
    nodes: 2
    link: {up: 2 Gbps, down: 2 Gbps, rtt: 5 ms}
    mtbf: 6 h
    restart: 4 min
    price: 112.0/h
    egress: 0.01/GB
  - {name: home, region: us-central1, infra: ssh, hosts: "box[1-2]", accelerators: RTX-4090:1}
machines:
  - {host: m1, region: us-central1, accelerators: A100-80GB:8, fabric: pod-a}
devices: {MyChip: {bf16_tflops: 120, memory_gb: 24}}
"""
