"""What strangers may write, and what becomes of it. A row's number is that of the table in README.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.chaos.actions import read_entries
from diloco_cli.cli.output import talk
from diloco_cli.config.codec import parse_object
from diloco_cli.config.hardware import expand_hostlist
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.run_file import load_run
from diloco_cli.digests import digest
from diloco_cli.errors import DataCheckError, DilocoError, UsageError
from diloco_cli.faults import load_scenario
from diloco_cli.observe.facts import UNKNOWN, moment
from diloco_cli.plan.plan import plan_from_text
from diloco_cli.protocol.actors.inbox import MAX_OFFERS_PER_POLL, MAX_OLD_MAILBOXES, Inbox
from diloco_cli.protocol.log.commit_log import fold, parse_format
from diloco_cli.protocol.log.keys import incarnation_key, offer_key
from diloco_cli.protocol.log.operations import Get, List, Operation, Steps
from diloco_cli.protocol.log.records import FORMAT_SCHEMA, MAX_EXACT, SCHEMA, encode
from diloco_cli.protocol.rules.merging import is_well_formed
from diloco_cli.runtime.daemon import say
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.url import normalise_store_url
from diloco_cli.tensors.payload import PayloadError, header_bytes, views
from tests.forked import run_diloco
from tests.security.parsers import AnsweringGcs
from tests.unit.protocol.played import played
from tests.unit.protocol.records import RUN, commit, genesis, offer

ROOT = Path(__file__).resolve().parents[2]


def well_formed(**fields: object) -> bool:
    return is_well_formed(replace(offer(genesis()), payload_digest=digest(b""), **fields))  # type: ignore[arg-type]


def poll(store: MemoryStore, inbox: Inbox, now_s: float = 1.0) -> int:
    return read(store, inbox.poll(genesis(), now_s, 0.0))


def read(store: MemoryStore, steps: Steps[Any]) -> int:
    """The number of requests."""
    requests = 0

    def answer(operation: Operation) -> Any:
        nonlocal requests
        assert isinstance(operation, Get | List)
        requests += 1
        return store.get(operation.key) if isinstance(operation, Get) else store.list(operation.prefix, operation.after)

    played(steps, answer)
    return requests


def inbox_of(store: MemoryStore) -> Inbox:
    inbox = Inbox(RUN)
    inbox.open(genesis(), 0.0)
    return inbox


def test_a_payloads_header_is_compared_before_anything_is_allocated() -> None:
    """Row 2: header length, names, offsets, shapes, total size checked before allocation."""
    import torch

    spec = {"values": (torch.float32, (4,))}
    honest = header_bytes(spec) + bytes(16)
    assert views(honest, spec)["values"].shape == (4,)
    huge = (1 << 62).to_bytes(8, "little")
    for strange in (b"", huge, huge + honest[8:], honest[:-1], honest + b"\\0", honest.replace(b"F32", b"F64"),
                    honest.replace(b"[4]", b"[9]"), honest.replace(b"values", b"__meta")):  # fmt: skip
        with pytest.raises(PayloadError):
            views(strange, spec)


def test_yaml_files_are_bounded_and_unknown_keys_are_errors(tmp_path: Path) -> None:
    """Row 3; what is refused in YAML: tests/unit/config/test_yaml_tree.py."""
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n" + "#" * 9_000_000)
    with pytest.raises(UsageError, match="larger than"):
        load_run(path)
    path.write_text("name: a\nmodell: {preset: gpt-nano}\n")
    with pytest.raises(UsageError, match="unknown key 'modell'"):
        load_run(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": 1, "a": 2}',
     '{"a": ' * 40 + "1" + "}" * 40,
     '{"a": ' * 100_000, '{"a": 123456789012345678901}', "x" * 2000],
)  # fmt: skip
def test_json_is_bounded_and_unambiguous(text: str) -> None:
    """Row 4: JSON: size and depth caps, no NaN, no duplicate keys; numbers that nothing can hold are none (row 20)."""
    with pytest.raises(ValueError):
        parse_object(text, 1_000_000 if len(text) > 100_000 else 1000)


@pytest.mark.parametrize("entry", ["-oProxyCommand=id", "--help", "box1,-x", "a b", "a;id", "$(id)", "a\nb", "a`id`"])
def test_hosts_cannot_become_options_or_commands(entry: str) -> None:
    """Row 8: no option injection through a host's name. (No backend starts ssh by itself.)"""
    with pytest.raises(UsageError):
        expand_hostlist(entry)


def test_an_offer_under_one_learners_prefix_cannot_speak_for_another() -> None:
    """Row 11: a learner can change only its own prefix, and the reader refuses what claims otherwise."""
    store = MemoryStore()
    inbox = inbox_of(store)
    theirs = replace(offer(genesis(), learner="l1"), payload_digest=digest(b""))
    store.create(offer_key("l0", 1, 0), encode(theirs))
    poll(store, inbox)
    assert [(outcome.learner, outcome.reason) for outcome in inbox.outcomes] == [("l0", "bad_record")]
    assert not any(box.pending for box in inbox.mailboxes.values())


def test_one_learners_flood_is_read_in_portions_and_the_others_are_read_beside_it() -> None:
    """Row 14: one learner's flood does not slow the others."""
    store = MemoryStore()
    inbox = inbox_of(store)
    for seq in range(200):
        store.create(offer_key("l0", 1, seq), b"{}")
    store.create(offer_key("l1", 1, 0), encode(replace(offer(genesis(), learner="l1"), payload_digest=digest(b""))))
    poll(store, inbox)
    assert len(inbox.outcomes) == MAX_OFFERS_PER_POLL
    assert [found.learner for box in inbox.mailboxes.values() for found in box.pending] == ["l1"]


def test_dead_incarnations_are_passed_in_doubling_steps_and_few_are_kept() -> None:
    store, inbox = MemoryStore(), inbox_of(MemoryStore())
    for number in range(1, 1001):
        store.create(incarnation_key("l0", number), b"{}")
    assert read(store, inbox.look_for_incarnations(genesis(), 1.0)) <= 2 * 10 + 4
    assert inbox.claims["l0", 0].newest == 1000
    assert len([name for name, _ in inbox.mailboxes if name == "l0"]) <= MAX_OLD_MAILBOXES + 2


@pytest.mark.parametrize("text", ["fine\x1b[2J", "a\x07b", "\u202egnp", "\ud800", "a\x9bb"])
def test_control_characters_never_reach_a_terminal(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Row 19: control characters in errors are escaped (status: test_fuzz.py; logs: tests/unit/launch)."""
    talk(f"error: {text}\nhint: none")
    said = capfd.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in said)
    assert said.count("\n") == 2 and "\\" in said


def test_numbers_from_outside_are_bounded() -> None:
    """Row 20: numbers from outside are bounded."""
    assert well_formed()
    for strange in (-1, MAX_EXACT, 10**30):
        for name in ("slot", "fragment", "base", "data_start", "data_end", "tokens", "steps", "payload_bytes"):
            assert not well_formed(**{name: strange}), (name, strange)


@pytest.mark.parametrize("text", ["", "then", "9999-99-99", "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59", "1e9"])
def test_a_strange_time_is_unknown_and_breaks_nothing(text: str) -> None:
    """Row 20."""
    assert moment(text) == UNKNOWN


def test_a_directory_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    """Row 21: a prefix must hold its FORMAT.json, or no command does anything to it."""
    (tmp_path / "precious").write_text("mine")
    for words in (["stop"], ["rollback", "--to", "0", "--yes"], ["gc", "--yes"]):
        done = run_diloco(words[0], tmp_path.as_uri(), *words[1:], folder=tmp_path, DILOCO_HOME=str(tmp_path))
        assert done.returncode == 4, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_newer_schema_is_refused_and_never_guessed(tmp_path: Path) -> None:
    """Row 23: newer schema is refused, never guessed."""
    newer = {"schema": SCHEMA + 1}
    with pytest.raises(DataCheckError, match="schema"):
        parse_format(encode(json.loads(encode(RUN)) | {"schema": FORMAT_SCHEMA + 1}), "u")
    with pytest.raises(DataCheckError, match="schema"):
        state = genesis()
        fold(RUN, state, encode(json.loads(encode(commit(state, "finish"))) | newer))
    assert not well_formed(schema=SCHEMA + 1)
    with pytest.raises(UsageError, match="newer"):
        plan_from_text('{"format": "diloco-plan", "version": 99}', "p")
    for load in (load_run, load_inventory, load_scenario):
        (tmp_path / "file.yaml").write_text("version: 99\nsomething: new\n")
        with pytest.raises(UsageError, match="newer than this diloco reads"):
            load(tmp_path / "file.yaml")


# What random input found, so that it stays mended.


def test_a_plan_of_infinities_or_towers_is_a_usage_error() -> None:
    for text in ('{"format": "diloco-plan", "version": 2, "plan": Infinity}', '{"a":' * 5000):
        with pytest.raises(UsageError, match="JSON"):
            plan_from_text(text, "p")


def test_a_foreign_line_in_the_journal_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path))
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "chaos.jsonl").write_bytes(b'{"id":[],"time":"","seed":7,"fault":"kill","target":""}\n[1]\n')
    assert read_entries("nano") == []


def test_a_home_of_nobody_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="home"):
        normalise_store_url("~nobody-here/runs", Path("/"))


@pytest.mark.parametrize("body", [b'{"items": "9"}', b'{"items": [3]}', b'{"items": [{}]}', b'{"a":' * 5000, b"[]"])
def test_a_strange_listing_is_a_store_error(body: bytes) -> None:
    store = AnsweringGcs("bucket", "runs")
    store.body = body
    with pytest.raises(DilocoError):
        store.list("commit/")
    with pytest.raises(DilocoError):
        store.stat("commit/x")


def test_a_long_hostlist_is_read_or_refused_in_time_that_grows_with_its_length() -> None:
    from time import process_time

    started = process_time()
    for text in ("9" * 200_000, "a," * 100_000, "[" * 100_000, "a[" * 50_000):
        with pytest.raises(UsageError) as refused:
            expand_hostlist(text)
        assert len(str(refused.value)) < 1000
    assert process_time() - started < 2.0


def test_a_daemons_words_survive_any_text(capfd: pytest.CaptureFixture[str]) -> None:
    say("learner \ud800 said")
    assert "learner" in capfd.readouterr().out
