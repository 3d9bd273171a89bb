"""An inventory that is written reads back as the same inventory."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_cli.config.hardware import Accelerators, Device, Fabric
from diloco_cli.config.inventory_file import inventory_to_text, load_inventory
from diloco_cli.config.settings import (
    Inventory,
    IslandSettings,
    Link,
    LocalMachine,
    MachineSettings,
    RegionSettings,
    Site,
    StoreSettings,
)
from diloco_cli.paths import templates_directory

POSITIVE = st.integers(1, 10**12).map(lambda thousandths: thousandths / 1000)  # as people write numbers
MAYBE = st.none() | POSITIVE
NAMES = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
LINKS = st.builds(Link, MAYBE, MAYBE, st.just(0.0) | MAYBE, st.booleans())
SHARED = {
    "region": NAMES,
    "accelerators": st.builds(Accelerators, st.sampled_from(["H100-SXM", "cpu", "TPU-v5e"]), st.integers(1, 1000)),
    "infra": st.sampled_from(["local", "ssh", "slurm/a100", "kubernetes/my_context", "skypilot/aws"]),
    "link": LINKS,
    "mtbf_s": MAYBE,
    "restart_s": MAYBE,
    "price_per_h": st.just(0.0) | POSITIVE,
    "egress_per_gb": st.just(0.0) | POSITIVE,
    "slowdown": st.floats(min_value=1, max_value=1000),
    "batch_tokens": st.none() | st.integers(1, 10**12),
    "mfu": st.none() | st.floats(min_value=0.001, max_value=0.999),
    "tokens_per_s": MAYBE,
}
FABRICS = st.sampled_from([None, Fabric("ethernet"), Fabric(gbps=400.0), Fabric(gbps=0.5)])
ISLANDS = st.lists(
    st.builds(IslandSettings, name=NAMES, nodes=st.integers(1, 1000), fabric=FABRICS, **SHARED),
    max_size=4,
    unique_by=lambda i: i.name,
)
LAB = Site(
    "slurm", "ssh a@lab", "/x y", "a: b # c", options={"time": "1:00:00", "exclusive": True, "pod": {"a": [1, None]}}
)
INVENTORIES = st.builds(
    lambda islands, local, device: Inventory(
        StoreSettings("gs://my-bucket/runs"),
        tuple(i for i in islands if i.name not in ("syncer", "supervisor")),
        devices={"MyChip": device},
        machines=(MachineSettings("r", Accelerators("L4", 2), hosts=("box1", "box2", "x.lan"), nodes=3, fabric="p_1"),),
        local=local,
        sites={"lab": LAB},
    ),
    ISLANDS,
    st.none() | st.builds(LocalMachine, st.integers(1, 64)),
    st.builds(Device, st.just("MyChip"), MAYBE, POSITIVE, check=st.booleans(), note=st.none() | st.just("it's: mine")),
)


@settings(max_examples=60)
@given(inventory=INVENTORIES)
def test_what_is_written_reads_back_the_same(inventory, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    path.write_text(inventory_to_text(inventory, {}))
    assert load_inventory(path) == inventory


@pytest.mark.parametrize("name", ["7", "true", "1e5", "null"])
def test_names_that_yaml_would_read_as_something_else_are_quoted(name, tmp_path):
    inventory = Inventory(StoreSettings("gs://bucket"), (IslandSettings(name, "here", Accelerators("cpu")),))
    (tmp_path / "i.yaml").write_text(inventory_to_text(inventory, {}))
    assert load_inventory(tmp_path / "i.yaml") == inventory


def test_the_template_survives_being_written(tmp_path):
    template = load_inventory(templates_directory() / "inventory.yaml")
    (tmp_path / "i.yaml").write_text(inventory_to_text(template, {}))
    assert load_inventory(tmp_path / "i.yaml") == template


def test_it_reads_like_the_template_with_its_comments():
    island = IslandSettings(
        "iowa", "us", Accelerators("H100-SXM", 8), hosts=("a1", "a2"), nodes=2, infra="ssh",
        link=Link(2e9, 3e8, 0.005, True), mtbf_s=21_600.0, price_per_h=112.0, slowdown=2.0, tokens_per_s=465_000.0,
    )  # fmt: skip
    inventory = Inventory(StoreSettings("gs://bucket", "us"), (island,), regions={"us": RegionSettings()})
    text = inventory_to_text(inventory, {"islands.iowa.tokens_per_s": "measured"}, "one\ntwo")
    assert text == (
        "# one\n# two\nversion: 1\nstore: {url: gs://bucket, region: us}\nregions:\n  us: {}\nislands:\n"
        '  - name: iowa\n    hosts: "a[1-2]"\n    region: us\n    infra: ssh\n    accelerators: H100-SXM:8\n'
        "    link: {up: 2 Gbps, down: 300 Mbps, rtt: 5 ms, emulate: true}\n    mtbf: 6 h\n    price: 112/h\n"
        "    emulate: {slowdown: 2}\n    tokens_per_s: 465000                          # measured\n"
    )
