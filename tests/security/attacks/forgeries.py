"""Records that are not genuine, under keys of others (findings: a learner was muted for ever, and one ended)."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.protocol.log.keys import incarnation_key, offer_key
from diloco_cli.signing import Secret, Unsigned, learner_signer
from tests.security.attacks.stage import AttackedRun, AttackSeen, running
from tests.security.signed import private_key

FOREIGN = Secret("a secret that no operator of this run has", "the attacker")
L0 = learner_signer("l0")
RETIRED_AFTER_S = 135.0  # longer than a replaced incarnation's mailbox is read


def foreign(run_id: str) -> Unsigned:
    """A key for l0 that another operator has certified."""
    return Secret(FOREIGN.certified(run_id, {L0: private_key("foreign")}), "the attacker").keyring(run_id)


def forged_claim_and_offer(directory: Path) -> AttackSeen:
    """Signed run. A claim without a signature, and an offer signed with a foreign key, as l0's next incarnation."""
    with running(AttackedRun(directory, signed=True)) as stage:
        claim, offer = incarnation_key("l0", 2), offer_key("l0", 2, 0)
        stage.store.create(claim, b'{"number":2}')
        stage.store.create(offer, foreign(stage.run.run_id).sign(L0, offer, b'{"learner":"l0"}'))
        stage.merges_on(4)  # the forgeries are found
        goes_on = stage.merges_on(4, name="l0")
        floors = sum(o["reason"] == "old_incarnation" for r in stage.records() for o in r.get("outcomes", ()))
        return AttackSeen(
            goes_on, f"l0 {'is merged on' if goes_on else 'is never merged again'}; {floors} of its offers old"
        )


def forged_claim_alone(directory: Path) -> AttackSeen:
    """Signed run. The claim alone, for longer than the mailbox of a replaced incarnation is read."""
    with running(AttackedRun(directory, signed=True)) as stage:
        stage.store.create(incarnation_key("l0", 2), b'{"number":2}')
        stage.merges_on(10**6, within_s=RETIRED_AFTER_S)
        goes_on = stage.merges_on(4, name="l0")
        return AttackSeen(goes_on, f"after {RETIRED_AFTER_S:.0f} s l0 {'is merged on' if goes_on else 'is not merged'}")


def junk_under_the_next_offers(directory: Path) -> AttackSeen:
    """Junk under the keys of l0's next offers."""
    with running(AttackedRun(directory)) as stage:
        folder = (stage.bucket / offer_key("l0", 1, 0)).parent
        first = 1 + max(int(path.stem) for path in folder.glob("*.json"))
        for seq in range(first, first + 4):
            stage.store.create(offer_key("l0", 1, seq), b"junk")
        goes_on = stage.merges_on(4, name="l0", within_s=45.0)
        return AttackSeen(goes_on, f"l0 {'is merged on' if goes_on else 'is not merged again'}; {ended(stage)}")


def ended(stage: AttackedRun) -> str:
    """What its supervisor says of l0's end."""
    lines = [line for line in stage.said.read_text().splitlines() if "l0" in line and "ended" in line]
    return lines[-1].strip() if lines else "its process lives"
