"""Row 11: a learner can change only its own prefix. The policies that users install, against what a run really does."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from diloco_cli.cli.key import PolicyRole as Role
from diloco_cli.cli.key import policy_of
from diloco_cli.config.codec import replace
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.protocol.actors.collection import KINDS
from diloco_cli.protocol.log.keys import offer_key
from diloco_cli.protocol.log.operations import Steps, Together
from diloco_cli.virtual.world import Actor
from tests.faulty_world import FaultyWorld
from tests.security.policies import Judge, Verb, gcs_allows, verb_of
from tests.security.signed import SignedFleet, signed_run
from tests.simulation.operated import asked, done, frequent_snapshots, run_that_keeps, stand_in, state_of

__all__ = ["frequent_snapshots"]
JUDGE = Judge()
ROLES: dict[str, Role] = {"syncer": "syncer", "operator": "operator", "reader": "reader"}
EVERY_KIND = [
    "FORMAT.json", "plan.json", "epoch/0000000001.json",
    "incarnation/{}/00000001.json", "offer/{}/00000001/0000000000.json",
    "delta/{}/00000001/0000000000-x", "inner/{}/00000001/000000000001-x", "state/0000/000000000001-0000000001-x",
    "weights/0000/000000000001-0000000001-x", "commit/000000000001.json", "snapshot/000000000001.json",
    "request/0000000000.json", "certificate/learner/{}/00.json", "join/{}/0000000001-0000.json",
    "event/{}/0000000000001-00.jsonl",
    "heartbeat/{}.json", "heartbeat/syncer.json", "heartbeat/standby/a.json",
    "hint/head.json", "doctor-1/x", "elsewhere",
]  # fmt: skip


class PolicedWorld(FaultyWorld):
    """Every operation of every actor is asked of the templates before it is performed."""

    def __init__(self) -> None:
        super().__init__()
        self.done_by: dict[str, set[tuple[Verb, str]]] = defaultdict(set)

    def start(self, name: str, steps: Steps[Any], delay_s: float = 0.0) -> Actor:
        return super().start(name, self._policed(name, steps), delay_s)

    def _policed(self, name: str, steps: Steps[Any]) -> Steps[Any]:
        name = name.partition("/")[0]  # of its process
        answer, role = None, ROLES.get(name, "learner")
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as stop:
                return stop.value
            for one in operation.operations if isinstance(operation, Together) else (operation,):
                asked = verb_of(one)
                if asked is not None:
                    assert JUDGE.allows(role, name, *asked), f"{role} {name} may not {' '.join(asked)}"
                    self.done_by[role].add((asked[0], asked[1].partition("/")[0]))
            answer = yield operation


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_whole_run_stays_inside_the_policies_of_its_roles() -> None:
    """With signatures, snapshots, collection, a rollback, a newcomer, and a command that stands in for the syncer."""
    world = PolicedWorld()
    run = signed_run(run_that_keeps(rounds=2, merges=30))
    fleet = SignedFleet(run, world).start().until_commits(15)
    for kind, to in (("gc", None), ("rollback", state_of(fleet).n - 3)):
        asked(fleet, kind, to=to)  # type: ignore[arg-type]
        if kind == "rollback":
            fleet.kill("syncer")
            done(fleet, world.start("operator", stand_in(fleet)))
    fleet.finish()
    assert fleet.errors() == []
    written = {role: {(verb, kind) for verb, kind in made if verb != "get"} for role, made in world.done_by.items()}
    assert {("create", "offer"), ("create", "delta"), ("create", "incarnation")} <= written["learner"]
    assert {("delete", "delta"), ("create", "commit"), ("put", "hint"), ("create", "snapshot")} <= written["syncer"]
    assert {("create", "request"), ("create", "commit"), ("create", "state")} <= written["operator"]


def test_a_newcomer_asks_and_takes_part_inside_a_learners_policy() -> None:
    world = PolicedWorld()
    run = run_that_keeps(merges=20)
    data = run.settings.data
    fleet = SignedFleet(signed_run(replace(run, settings=replace(run.settings, data=replace(data, shards=4)))), world)
    fleet.start().until_commits(5)
    fleet.newcomer("l9")
    fleet.finish()
    assert fleet.errors() == []
    assert ("create", "join") in world.done_by["learner"]


def may(role: Role, verb: Verb) -> set[str]:
    """Of every kind of key, in one learner's name and in another's: those that `iowa` or the role may touch so."""
    keys = [key.format(who) for key in EVERY_KIND for who in ("iowa", "rhine")]
    return {key for key in keys if JUDGE.allows(role, "iowa", verb, key)}


def test_a_learner_changes_its_own_names_and_nothing_else() -> None:
    own = {"incarnation/iowa/", "offer/iowa/", "delta/iowa/", "inner/iowa/", "join/iowa/", "event/iowa/",
           "certificate/learner/iowa/"}  # fmt: skip
    created = may("learner", "create") - {"heartbeat/iowa.json"}
    assert {key.rpartition("iowa/")[0] + "iowa/" for key in created} == own
    assert not any("rhine" in key for key in may("learner", "create"))
    assert may("learner", "put") == {"heartbeat/iowa.json"}
    assert may("learner", "delete") <= {"heartbeat/iowa.json"}  # GCS: who may replace may delete
    assert not JUDGE.allows("learner", "iowa", "create", "offer/iowa2/00000001/0000000000.json")
    assert not JUDGE.allows("learner", "iowa", "put", offer_key("iowa", 1, 0))


@pytest.mark.parametrize("role", ["learner", "syncer", "operator", "reader"])
def test_nobody_replaces_or_deletes_the_log_or_what_others_claimed(role: Role) -> None:
    """Only hints, and what the log lets go of."""
    touched = {key.partition("/")[0] for verb in ("put", "delete") for key in may(role, verb)}
    assert touched <= {"heartbeat", "hint", "doctor-1", *KINDS}
    assert "commit/000000000001.json" in may(role, "get")


@pytest.mark.parametrize("role", ["syncer", "operator"])
def test_who_collects_may_delete_every_kind_that_is_collected_and_a_trial(role: Role) -> None:
    assert {key.partition("/")[0] for key in may(role, "delete")} >= set(KINDS)


def test_only_operators_and_a_learner_itself_leave_its_certificates() -> None:
    roles: tuple[Role, ...] = ("learner", "syncer", "operator", "reader")
    assert [role for role in roles if "certificate/learner/iowa/00.json" in may(role, "create")] == [
        "learner", "operator"
    ]  # fmt: skip
    assert not JUDGE.allows("learner", "iowa", "create", "certificate/learner/rhine/00.json")


@pytest.mark.parametrize(("role", "own"), [("learner", {"iowa"}), ("syncer", {"iowa", "rhine"})])
def test_parts_of_uploads_to_gcs_are_their_writers(role: Role, own: set[str]) -> None:
    """To be deleted once they are composed, to an object that their writer may create."""
    policy = json.loads(policy_of("gs://bucket/runs/toy", role, "iowa", "p", "user:me"))
    for who in ("iowa", "rhine"):
        for key in (f"delta/{who}/00000001/0000000000-x", f"inner/{who}/00000001/000000000001-x"):
            verbs: tuple[Verb, ...] = ("create", "delete")
            assert [gcs_allows(policy, verb, f"parts-of-uploads/{key}/x-00") for verb in verbs] == [who in own] * 2


def test_conditions_are_within_what_google_takes() -> None:
    """Twelve logical operators an expression; bindings of one role differ by their titles."""
    for role in ("learner", "syncer", "operator", "reader"):
        bindings = json.loads(policy_of("gs://bucket/runs/toy", role, "iowa", "p", "user:me"))["bindings"]
        conditions = [binding.get("condition", {}) for binding in bindings]
        assert all(condition.get("expression", "").count(" || ") <= 12 for condition in conditions)
        named = [(one["role"], condition.get("title")) for one, condition in zip(bindings, conditions, strict=True)]
        assert len(set(named)) == len(named)


def test_a_reader_reads() -> None:
    assert len(may("reader", "get")) == len({key.format(who) for key in EVERY_KIND for who in ("iowa", "rhine")})
    assert [may("reader", verb) for verb in ("create", "put", "delete")] == [set(), set(), set()]


def test_every_template_parses_and_leaves_no_placeholder() -> None:
    paths = sorted((templates_directory() / "bucket-policy").rglob("*.json"))
    assert len(paths) == 9 and all(json.loads(path.read_text()) for path in paths)
    for role in ("learner", "syncer", "operator", "reader"):
        for url in ("s3://bucket/runs/toy", "gs://bucket/runs/toy"):
            assert "@" not in policy_of(url, role, "iowa", "p", "user:me").replace("user:me", "")


@pytest.mark.parametrize(
    "asks",
    [
        lambda: policy_of("file:///tmp/x", "learner", "iowa"),
        lambda: policy_of("s3://bucket", "reader"),
        lambda: policy_of("s3://bucket/runs/toy", "learner", ""),
        lambda: policy_of("s3://bucket/runs/toy", "learner", "iowa/*"),
        lambda: policy_of("gs://bucket/runs/toy", "reader", "", "p", ""),
        lambda: policy_of("gs://bucket/runs/toy", "reader", "", 'p"', "user:me"),
        lambda: policy_of('gs://bucket/runs/t") || true', "reader", "", "p", "user:me"),
    ],
)
def test_what_is_missing_or_could_change_a_policys_meaning_is_refused(asks: Callable[[], str]) -> None:
    with pytest.raises(UsageError):
        asks()
