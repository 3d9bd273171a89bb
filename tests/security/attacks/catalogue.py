"""All attacks by name. README.md's table names them in its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.security.attacks import bucket_code, floods, foreign_objects, forgeries, leaving, norms, stopped_runs
from tests.security.attacks.stage import AttackSeen

ATTACKS: dict[str, Callable[[Path], AttackSeen]] = {
    **{f"norms-{name}": partial(norms.seen, name) for name in norms.BAD},
    "code-unsigned": bucket_code.unsigned_run,
    "code-signed-by-a-learner": bucket_code.signed_by_a_learner,
    "code-signed-by-another-operator": bucket_code.signed_by_another_operator,
    "code-no-longer-signed": bucket_code.no_longer_signed,
    "forged-claim-and-offer": forgeries.forged_claim_and_offer,
    "forged-claim": forgeries.forged_claim_alone,
    "junk-offers": forgeries.junk_under_the_next_offers,
    "signalled-supervisor": leaving.signalled_second_supervisor,
    "closed-terminal": leaving.closed_terminal,
    "stand-in": leaving.stand_in_retires_a_paused_syncer,
    "flood-of-joins": floods.join_requests,
    "flood-of-claims": floods.claims_under_an_own_prefix,
    "dead-incarnations": floods.dead_incarnations,
    "symlink-in-the-log": foreign_objects.symlink_at_a_coming_commit,
    "standby-after-a-stop": stopped_runs.standby_after_a_stop,
    "join-left-open": stopped_runs.join_left_open_by_a_stop,
}


def performed(name: str, directory: Path) -> AttackSeen:
    return ATTACKS[name](directory)
