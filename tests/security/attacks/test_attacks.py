"""Each attack must fail. All of them in one command: python -m tests.security.attacks"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.attacks.catalogue import ATTACKS, performed

QUICK = ("norms-nan", "dead-incarnations", "forged-claim-and-offer", "junk-offers", "stand-in")


def fails(name: str, directory: Path) -> None:
    verdict = performed(name, directory)
    assert verdict.holds, verdict.seen


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_attack_fails(name: str, tmp_path: Path) -> None:
    fails(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - set(QUICK)))
def test_an_attack_fails(name: str, tmp_path: Path) -> None:
    fails(name, tmp_path)
