"""inventory.yaml: islands, links and stores, strictly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_cli.config.hardware import Accelerators, compress_hostlist, expand_hostlist
from diloco_cli.config.inventory_file import load_inventory
from diloco_cli.config.settings import Link, LocalMachine, MachineSettings
from diloco_cli.environment import ALLOW_HTTP_VARIABLE, environment_value
from diloco_cli.errors import UsageError
from diloco_cli.paths import templates_directory
from diloco_cli.store.url import normalise_store_url

HEAD = "store: {url: bucket, region: here}\nregions: {here: {}, there: {store: gs://far/runs}}\nislands:\n"
ISLAND = (
    "  - {name: a, region: here, accelerators: 'H100-SXM:8', "
    "link: {up: 2 Gbps, down: 300 Mbps, rtt: 5 ms, emulate: true},"
    " emulate: {slowdown: 2.0}, mtbf: 6 h, restart: 4 min, price: 112.0/h, egress: 0.02/GB}\n"
)


def load(tmp_path: Path, text: str):
    path = tmp_path / "inventory.yaml"
    path.write_text(text)
    return load_inventory(path)


def test_an_island_is_typed_in_base_units(tmp_path):
    island = load(tmp_path, HEAD + ISLAND).islands[0]
    assert island.accelerators == Accelerators("H100-SXM", 8)
    assert (island.link.up_bps, island.link.down_bps, island.link.rtt_s) == (2e9, 300e6, 0.005)
    assert island.link.emulate
    assert (island.slowdown, island.mtbf_s, island.restart_s) == (2.0, 21600.0, 240.0)
    assert (island.price_per_h, island.egress_per_gb) == (112.0, 0.02)


def test_a_relative_store_lies_beside_the_inventory(tmp_path):
    inventory = load(tmp_path, HEAD + ISLAND)
    assert inventory.store.url == f"file://{tmp_path}/bucket"
    assert inventory.regions["there"].store == "gs://far/runs"


def test_the_syncers_link_belongs_to_the_store_and_is_never_emulated(tmp_path):
    stated = HEAD.replace("region: here}", "region: here, link: {up: 5 Gbps, rtt: 20 ms}}", 1)
    assert load(tmp_path, stated + ISLAND).store.link == Link(5e9, None, 0.02)
    with pytest.raises(UsageError, match="is not emulated") as caught:
        load(tmp_path, stated.replace("rtt: 20 ms", "emulate: true") + ISLAND)
    assert caught.value.where is not None and ":1" in caught.value.where


def test_hosts_count_as_nodes(tmp_path):
    text = HEAD + "  - {name: a, region: here, accelerators: RTX-4090:1, infra: ssh, hosts: 'box[1-2]'}\n"
    island = load(tmp_path, text).islands[0]
    assert (island.hosts, island.nodes) == (("box1", "box2"), 2)


@pytest.mark.parametrize(
    ("written", "ranks"),
    [
        ("'H100:8', nodes: 2", 16),
        ("'H100:8', ranks: 8", 8),
        ("'cpu:4'", 1),
        ("'cpu:1', nodes: 2, ranks: 3", 6),
        ("mps", 1),
    ],
)
def test_an_accelerator_has_one_rank_and_a_cpu_as_many_as_are_asked_for(tmp_path, written, ranks):
    island = load(tmp_path, HEAD + f"  - {{name: a, region: here, accelerators: {written}}}\n").islands[0]
    assert island.num_ranks == ranks


def test_accelerators_without_a_rank_of_their_own_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"islands\.a\.ranks: 4, but each of its 8 H100-SXM has one rank") as caught:
        load(tmp_path, HEAD + "  - {name: a, region: here, accelerators: 'H100:8', ranks: 4}\n")
    assert "accelerators: H100-SXM:4" in (caught.value.hint or "")


def test_own_devices_come_before_the_catalogue(tmp_path):
    text = HEAD + "  - {name: a, region: here, accelerators: MyChip:4}\n"
    inventory = load(tmp_path, text + "devices: {MyChip: {bf16_tflops: 120, memory_gb: 24}}\n")
    assert inventory.devices["MyChip"].bf16_tflops == 120


def test_a_known_device_is_corrected_in_one_figure_and_keeps_the_others(tmp_path):
    inventory = load(tmp_path, HEAD + ISLAND + "devices: {H100-SXM: {achievable: 0.7}}\n")
    device = inventory.devices["H100-SXM"]
    assert (device.achievable, device.bf16_tflops, device.memory_gb) == (0.7, 989, 80)


def test_names_as_skypilot_writes_them_become_the_catalogues(tmp_path):
    text = HEAD + "  - {name: a, region: here, accelerators: 'A100-80GB:8'}\n"
    text += "  - {name: b, region: here, accelerators: tpu-v5p-8, nodes: 2}\n"
    islands = load(tmp_path, text).islands
    assert [island.accelerators for island in islands] == [Accelerators("A100-80GB-SXM", 8), Accelerators("TPU-v5p", 4)]
    assert islands[1].nodes == 2


MACHINES = """version: 1
store: {url: bucket}
machines:
  - {hosts: "box[1-2],x.lan", region: here, infra: ssh, fabric: pod-a, accelerators: 'RTX-4090:2', price: 3/h,
     link: {up: 1 Gbps}, mtbf: 2 d}
  - {host: alone, region: there, accelerators: 'cpu:4', emulate: {slowdown: 2}, tokens_per_s: 100}
  - {name: rack, nodes: 16, region: here, infra: slurm/h100, fabric: ib0, accelerators: 'H100:8', mfu: 0.4}
local: {cores: 2}
"""


def test_machines_may_stand_instead_of_islands(tmp_path):
    inventory = load(tmp_path, MACHINES)
    boxes, alone, rack = inventory.machines
    assert boxes == MachineSettings(
        "here", Accelerators("RTX-4090", 2), hosts=("box1", "box2", "x.lan"), nodes=3, fabric="pod-a", infra="ssh",
        price_per_h=3.0, link=Link(up_bps=1e9), mtbf_s=172_800.0,
    )  # fmt: skip
    assert (alone.hosts, alone.slowdown, alone.tokens_per_s, alone.fabric) == (("alone",), 2.0, 100.0, None)
    assert (rack.name, rack.hosts, rack.nodes, rack.accelerators) == ("rack", (), 16, Accelerators("H100-SXM", 8))
    assert inventory.islands == () and inventory.local == LocalMachine(2)


def test_islands_and_machines_may_stand_together(tmp_path):
    inventory = load(tmp_path, MACHINES + "islands:\n  - {name: a, region: here, accelerators: 'cpu:1'}\n")
    assert (len(inventory.islands), len(inventory.machines)) == (1, 3)


def test_the_commented_parts_of_the_template_are_valid_too(tmp_path):
    """Every `# key:` line of the template that is a section, with what follows it, read as if it were not commented."""
    template = (templates_directory() / "inventory.yaml").read_text()
    sections = re.findall(r"(?m)^# ((?:machines|devices|local):\n(?:#   .*\n)+)", template)
    assert [section.split(":")[0] for section in sections] == ["machines", "devices", "local"]
    text = template + "".join(re.sub(r"(?m)^# ?", "", section) for section in sections)
    inventory = load(tmp_path, text)
    assert [machine.nodes for machine in inventory.machines] == [16, 4]
    assert set(inventory.devices) == {"MyChip", "H100-SXM"} and inventory.local.cores == 2


MALFORMED = [  # and those of test_malformed_inventories.py
    ("H100-SXM:8", "H100-SXM:0", "must be NAME:COUNT such as H100-SXM:8"),
    ("2 Gbps", "fast", "bandwidth 'fast' is no number with a unit"),
    ("emulate: true", "emulate: yes", "islands.a.link.emulate: must be true or false, not 'yes'"),
    ("slowdown: 2.0", "slowdown: 0.5", "islands.a.emulate: slowdown must be from 1 to 1000, not 0.5"),
    ("slowdown: 2.0", "slowdown: fast", "islands.a.emulate: slowdown must be from 1 to 1000, not fast"),
    ("name: a", "name: supervisor", "islands.supervisor: no island can be called so"),
    ("restart: 4 min", "nodes: 0", "islands.a.nodes: must be from 1 to 100000, not 0"),
    ("url: bucket", "url: 'gs://'", "no valid bucket name"),
]


@pytest.mark.parametrize(("old", "new", "message"), MALFORMED, ids=[new for _, new, _ in MALFORMED])
def test_malformed_inventories_are_refused_with_what_is_allowed(tmp_path, old, new, message):
    text = (HEAD + ISLAND).replace(old, new, 1)
    assert text != HEAD + ISLAND
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert str(tmp_path / "inventory.yaml") in caught.value.where


@pytest.mark.parametrize("text", ["store: {url: b}\nislands: []\n", "store: {url: b}\n", "[]\n", "just words\n"])
def test_an_inventory_without_islands_is_refused(tmp_path, text):
    with pytest.raises(UsageError, match=r"islands|mapping"):
        load(tmp_path, text)


def test_hostlists_keep_order_and_leading_zeros() -> None:
    assert expand_hostlist("n[08-10,12],login") == ("n08", "n09", "n10", "n12", "login")
    assert compress_hostlist(["box9", "box10", "box11", "n08", "n09", "login"]) == "box[9-11],n[08-09],login"


@given(hosts=st.lists(st.from_regex(r"[a-z]{1,2}[0-9]{0,3}(-[a-z])?", fullmatch=True), unique=True, min_size=1))
def test_a_compressed_hostlist_expands_to_the_same_hosts(hosts):
    assert expand_hostlist(compress_hostlist(hosts)) == tuple(hosts)


@pytest.mark.parametrize("text", ["", "a,,b", "n[1-", "n[a-b]", "n[1-99999]", "a,a", "-oProxyCommand=x", "a b"])
def test_hostlists_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match="hostlist"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("bucket", "file:///base/bucket"),
        ("../b", "file:///b"),
        ("/abs/x/", "file:///abs/x"),
        ("file:///a/../b", "file:///b"),
        ("gs://my-bucket/runs/", "gs://my-bucket/runs"),
        ("s3://my.bucket", "s3://my.bucket"),
        ("memory://test", "memory://test"),
    ],
)
def test_store_urls_become_absolute(text, url):
    assert normalise_store_url(text, Path("/base")) == url


@pytest.mark.parametrize("text", ["ftp://x/y", "s3://key:secret@b", "gs://b/../c", "file://relative", "a\nb", "GS://b"])
def test_other_store_urls_are_refused(text):
    with pytest.raises(UsageError):
        normalise_store_url(text, Path("/base"))


def test_an_inventory_allows_plain_http_to_one_host_of_ones_own_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_HTTP_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(ALLOW_HTTP_VARIABLE)
    text = HEAD.replace("region: here}", "region: here, allow_http: minio.lan}", 1) + ISLAND
    assert load(tmp_path, text).store.allow_http == environment_value(ALLOW_HTTP_VARIABLE) == "minio.lan"
    for wrong in ("http://minio.lan", "a b", "'*'"):
        with pytest.raises(UsageError, match="allow_http"):
            load(tmp_path, text.replace("minio.lan", wrong))
