"""Keys: what sorts, what is confined, what may be a name."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.settings import SyncSettings
from diloco_cli.digests import digest
from diloco_cli.layout import ParameterFact, make_layout
from diloco_cli.protocol.log import keys
from diloco_cli.store.port import check_key
from diloco_cli.tensors.payload import header_bytes


def test_keys_sort_in_the_order_of_their_numbers() -> None:
    numbers = [0, 1, 9, 10, 99, 10**6, 10**9]
    for key_of in (keys.epoch_key, keys.commit_key, keys.snapshot_key, keys.request_key):
        made = [key_of(number) for number in numbers]
        assert made == sorted(made) and len(set(made)) == len(made)


def test_every_key_is_one_that_stores_accept() -> None:
    name = "a" * 63
    for key in (
        keys.FORMAT_KEY, keys.HEAD_HINT_KEY, keys.epoch_key(1), keys.incarnation_key(name, 1),
        keys.offer_key(name, 1, 2), keys.delta_key(name, 1, 2, digest(b"")), keys.state_key(1, 2, 3, digest(b"")),
        keys.weights_key(1, 2, 3, digest(b"")), keys.commit_key(10**12), keys.inner_key(name, 1, 2, digest(b"")),
        keys.heartbeat_key(name), keys.join_key(name, 1, 2), keys.offer_key(name, 3 << 32 | 1, 2),
    ):  # fmt: skip
        assert check_key(key) == key


def test_everything_that_a_learner_writes_lies_under_its_name() -> None:
    for key in (
        keys.incarnation_key("l0", 1), keys.offer_key("l0", 1, 2), keys.delta_key("l0", 1, 2, "d"),
        keys.inner_key("l0", 1, 2, "d"), keys.join_key("l0", 1, 2),
    ):  # fmt: skip
        assert key.split("/")[1] == "l0"


def test_a_payload_lies_beside_its_offer() -> None:
    stem = keys.offer_key("l0", 1, 2).removesuffix(".json").removeprefix("offer/")
    assert keys.delta_key("l0", 1, 2, "d") == f"delta/{stem}-d"


@pytest.mark.parametrize("text", ["a", "0", "h100-a", "a" * 63])
def test_names(text: str) -> None:
    assert keys.is_name(text)


@pytest.mark.parametrize("text", ["", "-a", "A", "a_b", "a/b", "..", "a" * 64, "a\n", "\u00e4", "a b"])
def test_what_is_no_name(text: str) -> None:
    assert not keys.is_name(text)


def test_the_moments_of_a_model_of_many_experts_are_not_too_long() -> None:
    """Of 60 layers with 256 experts of three matrices each: the header alone has 13 MB."""
    experts = (f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(60) for expert in range(256))
    names = (f"{expert}.{matrix}_proj.weight" for expert in experts for matrix in ("gate", "up", "down"))
    layout = make_layout([ParameterFact(name, (7168, 2048), False) for name in names], SyncSettings(fragments=24))
    slots = [slot for fragment in layout.fragments for slot in fragment.tensors]
    spec = {f"{slot.name}.{of}": (torch.float32, slot.shape) for slot in slots for of in ("exp_avg", "exp_avg_sq")}
    header = len(header_bytes(spec))
    assert header > 12e6 and header + 8 * layout.num_parameters <= keys.max_moments_bytes(layout)
