"""CONTRIBUTING's recipe for a store, carried out: a record and a module, and every part of the product knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_cli.cli.key import policy_of
from diloco_cli.config.settings import StoreSettings
from diloco_cli.doctor.examine import Effort, examine
from diloco_cli.errors import UsageError
from diloco_cli.plan.link import machine_of
from diloco_cli.randomness import nonce
from diloco_cli.store.bucket import missing_bucket
from diloco_cli.store.memory import MemoryStore
from diloco_cli.store.open import discard_leftovers_at, open_store
from diloco_cli.store.port import Discarded, Store
from diloco_cli.store.url import KINDS, StoreKind, join_url, normalise_store_url, parse_url
from diloco_cli.store.wrappers import PrefixedStore
from tests.contract import test_contract as contract
from tests.contract.conftest import Backend

PLACES: dict[str, MemoryStore] = {}


def open_toy(place: str, prefix: str) -> Store:
    """What a module of diloco_cli/store/ would hold."""
    store = PLACES.setdefault(place, MemoryStore(place))
    return PrefixedStore(store, prefix) if prefix else store


TOY = StoreKind(
    scheme="toy",
    example="toy://BOX/PREFIX",
    place=r"[a-z]{3,20}",
    opener=f"{__name__}:open_toy",
    is_bucket=True,
    is_shared=False,
    makes_place="toy make {place}",
    policies_hint="a box has one key",
    login_hint="toy login",
)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(KINDS, "toy", TOY)
    return f"toy://box/{nonce()}"


def test_a_new_store_passes_the_core_of_the_contract(url: str) -> None:
    backend = Backend("toy", lambda: open_store(url))
    contract.test_a_created_object_holds_its_bytes_and_is_seen_at_once_by_another_client(backend)
    for number, of_a_store in enumerate(
        (
            contract.test_a_second_creator_gets_the_holders_bytes_and_changes_nothing,
            contract.test_a_missing_object_is_none_for_every_reading_verb,
            contract.test_of_an_object_longer_than_the_bound_one_byte_more_is_read,
            contract.test_listing_is_in_lexical_order_and_honours_prefix_after_and_limit,
            contract.test_delete_may_be_repeated_and_frees_the_key,
        )
    ):
        of_a_store(open_store(join_url(url, f"run-{number}")))
    contract.test_of_eight_racing_threads_exactly_one_wins_each_round(backend)


def test_config_plan_doctor_and_errors_know_a_new_store(url: str) -> None:
    assert normalise_store_url(f"{url}/", Path("/")) == url and parse_url(url).place == "box"
    with pytest.raises(UsageError):
        parse_url("toy://NO/x")
    assert machine_of(StoreSettings(url)).reads_back
    assert discard_leftovers_at(url) == Discarded()
    assert missing_bucket(url).hint == "toy make box"
    with pytest.raises(UsageError) as refused:
        policy_of(url, "reader")
    assert refused.value.hint == "a box has one key"
    assert examine(url, lambda check: None, 60, Effort(4, 3, 5, 1_000_000)).ok
