"""Every decision of the protocol has one home. Daemons, simulations and tapes call it; nobody decides by himself."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "diloco_cli"
DECISIONS = {
    "quorum": ("decide_slot", "grace_window", "overlap_slots", "measured_pace", "alive_within_s"),
    "eligibility": ("refusal", "is_well_formed", "has_possible_size", "most_steps"),
    "schedule": (
        "fragment_of_slot", "slots_reached", "slot_to_offer", "measured_local_steps", "may_step", "fraction_of_run",
    ),
    "weights": ("token_weight",),
    "mixing": ("mixing_of", "rebase_of_next"),
    "membership": ("refusal_of_island", "contradiction_of_member", "as_admitted"),
    "requests": ("pending_requests",),
    "operators": ("answer_to",),
    "quarantine": ("to_quarantine", "faults_after"),
    "rollback": ("return_to", "published_anew"),
    "collection": ("is_garbage", "next_floor"),
    "standby": ("patience_s", "takeover_s"),
    "training": ("is_over", "awaits_last", "merge_is_due", "waited_for", "save_is_due"),
    "polling": (
        "next_request_s", "expected_slot_s", "watch_every_s", "fence_check_every_s", "requests_every_s",
    ),
    "joining": ("fetch_cast", "newer_incarnation"),
    "log": ("claim_number", "fence", "read_log"),
}  # fmt: skip
USERS = ("simulate", "tapes", "syncer", "learner", "launch", "observe", "cli")
POLICY = {"quorum", "staleness_rounds", "drift_rounds", "skip_after_s", "gamma", "takeover_s"}
MAY_WEIGH = {
    "syncer/bookkeeping.py": "checks what was decided, by books of its own",
    "simulate/histories/replayer.py": "likewise",
    "simulate/histories/monitor.py": "likewise",
    "simulate/histories/demands.py": "bounds how long a history may take without a merge",
    "simulate/slots.py": "works out when to ask decide_slot again; test_slots.py asks it at every moment",
    "tapes/virtual_syncer.py": "likewise: the next moment at which anything could change",
}
MAY_ASK_THE_PHASE = {
    "observe/status.py": "shows it",
    "cli/operator_request.py": "tells people what the log has made of their request",
    "cli/resume.py": "refuses what is over to whoever asks for more of it",
    "cli/stop.py": "likewise; it stopped the run itself",
    "simulate/fleet.py": "turns off the virtual clock",
    "simulate/what_if.py": "says whether the simulated run has ended",
}
OTHERS = {("refusal", "chaos/rails.py")}  # of a fault, not of an offer
HOMES = {name: f"diloco_cli.protocol.{module}" for module, names in DECISIONS.items() for name in names}
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_each_decision_is_a_function_of_the_protocol_and_defined_once() -> None:
    homes = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in HOMES and (node.name, path) not in OTHERS:
                homes[node.name].append(path)
    assert dict(homes) == {name: [f"protocol/{home.rpartition('.')[2]}.py"] for name, home in HOMES.items()}


@pytest.mark.parametrize("part", USERS)
def test_whoever_needs_a_decision_calls_the_products_own(part: str) -> None:
    """Each use of one of these names, wherever outside the protocol, is an import of the very function."""
    for path, tree in TREES.items():
        if not path.startswith(f"{part}/"):
            continue
        imported = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in HOMES:
                assert imported.get(called) == f"{HOMES[called]}.{called}", f"{path}: {called}"


def test_what_the_simulations_call_is_the_same_object() -> None:
    called = {
        "diloco_cli.simulate.slots": ("decide_slot", "grace_window"),
        "diloco_cli.simulate.island": ("mixing_of", "is_over", "merge_is_due", "waited_for", "save_is_due"),
        "diloco_cli.simulate.histories.learner": (
            "follow", "newer_incarnation", "is_over", "awaits_last", "save_is_due", "next_request_s",
            "fence_check_every_s",
        ),
        "diloco_cli.learner.loop": ("is_over", "awaits_last", "merge_is_due", "waited_for", "save_is_due"),
        "diloco_cli.learner.exchange": ("is_over", "next_request_s", "fence_check_every_s"),
        "diloco_cli.tapes.fleet": ("merge_is_due", "waited_for"),
        "diloco_cli.syncer.bookkeeping": ("token_weight", "fragment_of_slot"),
    }  # fmt: skip
    for module, names in called.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            assert found.__module__.startswith("diloco_cli.protocol."), f"{module}.{name}"


def test_the_fleets_syncers_and_books_are_the_products() -> None:
    from diloco_cli.protocol import standby, syncer
    from diloco_cli.simulate import fleet
    from diloco_cli.simulate.histories import history

    assert vars(fleet)["Syncer"] is syncer.Syncer is history.Actors().syncer
    assert history.Actors().standby is standby.Standby


def test_nobody_weighs_the_protocols_settings_by_himself() -> None:
    """A comparison with, or a sum of, a setting of the protocol is a decision: it belongs into protocol/."""
    own = [
        f"{path}:{node.lineno}"
        for path, tree in TREES.items()
        if path.split("/")[0] in ("simulate", "tapes", "syncer", "learner") and path not in MAY_WEIGH
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.BinOp)
        for side in ast.iter_child_nodes(node)
        if isinstance(side, ast.Attribute) and side.attr in POLICY
    ]
    assert own == []


def test_nobody_tells_from_the_phase_by_himself_whether_the_run_goes_on() -> None:
    """What follows from FINISHED, and from a stop, depends on when somebody began: `is_over` says it."""
    asks = {
        path
        for path, tree in TREES.items()
        if not path.startswith("protocol/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and _compares_a_phase([node.left, *node.comparators])
    }
    assert asks == set(MAY_ASK_THE_PHASE)


def _compares_a_phase(sides: list[ast.expr]) -> bool:
    names = {side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides}
    literals = [node for side in sides for node in ast.walk(side) if isinstance(node, ast.Constant)]
    return "phase" in names and any(isinstance(literal.value, str) for literal in literals)
