"""What sinfo, kubectl and nvidia-smi print, as entries of an inventory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.config.inventory_file import inventory_to_text, load_inventory
from diloco_cli.errors import TryAgainError, UsageError
from diloco_cli.probe.clusters import (
    SMI,
    Pool,
    ask,
    entry_of,
    known_device,
    kubernetes_pools,
    read_sinfo,
    slurm_pools,
    ssh_pool,
)


@pytest.mark.parametrize(
    ("said", "pools", "left"),
    [
        ("welcome\na*|up|idle|2|gpu:h100:8(S:0-1)|96|n[1-2]", [("a", 2, "h100", 8, 96, "2 idle")], []),
        (
            "a*|up|idle|2|gpu:2|8+|n[1-2]\na*|up|allocated|1|gpu:2|8|n3\na*|up|drained|1|gpu:2|8|n4",
            [("a", 3, "", 2, 8, "2 idle, 1 allocated")],
            ["a: 1 drained"],
        ),
        (
            "big|up|mixed|1|(null)|64|n[1]\nall*|up|mixed|2|(null)|64|n[1-2]",
            [("all", 2, "", 0, 64, "2 mixed")],
            ["big: n[1], counted in all"],
        ),
        (
            "gpu*|up|idle|4|gpu:l4:8|64|n[1-4]\nall|up|idle|10|gpu:l4:8|64|n[1-10]\nold|up|idle|2|(null)|8|n[5-6]",
            [("gpu", 4, "l4", 8, 64, "4 idle"), ("all", 6, "l4", 8, 64, "6 idle")],
            ["all: 4 of n[1-10], counted in gpu", "old: n[5-6], counted in all"],
        ),
        ("a|inact|idle|2|(null)|4|n[1-2]\nb|up|idle*|1|(null)|4|n3", [], ["a: 2 idle, partition inact", "b: 1 idle*"]),
        ("a|up|idle|1|gpu:a100:4|8|x[1-2]y[3-4]", [("a", 1, "a100", 4, 8, "1 idle")], []),
        ("a|up|idle|1|gpu:a100_1g.5gb:7|8|n1", [("a", 1, "a100_1g.5gb", 7, 8, "1 idle")], []),
        ("a|up|idle|1|gpu:1g.5gb:7|8|n1", [("a", 1, "1g.5gb", 7, 8, "1 idle")], []),
        (
            "a|up|idle|2|gpu:v100:2(S:0),gpu:a100:2(S:1)|8|n[1-2]\na|up|idle|1|gpu:a100:2,shard:8|8|n3",
            [("a", 2, "v100", 2, 8, "2 idle, without 2 x a100"), ("a", 1, "a100", 2, 8, "1 idle")],
            [
                "a: 2 x a100 beside 2 x v100 (to be given the latter: sites: {a: {engine: slurm,"
                ' options: {partition: a, gpus-per-node: "v100:2"}}})'
            ],
        ),
        (
            "a|up|idle|1|gpu:odd:4,gpu:l4:1|8|n1",
            [("a", 1, "l4", 1, 8, "1 idle, without 4 x odd")],
            [
                "a: 4 x odd beside 1 x l4 (to be given the latter: sites: {a: {engine: slurm,"
                ' options: {partition: a, gpus-per-node: "l4:1"}}})'
            ],
        ),
        ("", [], []),
    ],
)
def test_nodes_of_slurm_count_once_and_those_that_are_out_are_named(
    said: str, pools: list[tuple[Any, ...]], left: list[str]
) -> None:
    assert slurm_pools(read_sinfo(said)) == ([Pool(f"slurm/{name}", *others) for name, *others in pools], left)


def node(name: str, *, labels: dict[str, str] | None = None, ready: str = "True", **others: Any) -> dict[str, Any]:
    room = {"cpu": others.pop("cpu", "15890m"), **others.pop("gpus", {})}
    status = {"allocatable": room, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"name": name, "labels": labels or {}}, "spec": others, "status": status}


def test_nodes_of_kubernetes_that_take_pods_are_grouped_by_what_they_have() -> None:
    h100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/region": "Europe_West4"}
    owned = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    items = [
        node("master", taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]),
        node("g1", labels=h100, gpus={"nvidia.com/gpu": "8"}, taints=owned),
        node("g2", labels=h100, gpus={"nvidia.com/gpu": "8"}),
        node("m1", gpus={"amd.com/gpu": "4", "nvidia.com/gpu": "0"}, cpu="8"),
        node("c1"),
        node("c2", unschedulable=True),
        node("c3", ready="Unknown"),
        node("k3s", cpu="4"),
        node("tiny", cpu="1"),
    ]
    pools, left = kubernetes_pools("welcome\n" + json.dumps({"items": items}), "gke")
    assert pools == [
        Pool("kubernetes/gke", 2, "NVIDIA-H100-80GB-HBM3", 8, 15, "2 ready", "europe-west4"),
        Pool("kubernetes/gke", 1, "", 4, 7, "1 ready"),
        Pool("kubernetes/gke", 1, "", 0, 15, "1 ready, without the cores of the cluster's own pods"),
        Pool("kubernetes/gke", 1, "", 0, 3, "1 ready, without the cores of the cluster's own pods"),
    ]
    assert left == [
        "master: tainted: node-role.kubernetes.io/control-plane",
        "c2: cordoned",
        "c3: not ready",
        "tiny: cpu 1: no core beside the cluster's own pods",
    ]
    with pytest.raises(TryAgainError, match="no list of nodes"):
        kubernetes_pools("error", "gke")


def test_a_host_says_what_it_has() -> None:
    assert ssh_pool("NVIDIA L4\nNVIDIA L4\n16\n", "box") == Pool(
        "ssh/box", 1, "NVIDIA L4", 2, 16, "by nvidia-smi and nproc"
    )
    assert ssh_pool("4\n", "box").gpus == ssh_pool("\n4\n", "box").gpus == 0
    mixed = ssh_pool("NVIDIA T400\nNVIDIA T400\nNVIDIA GeForce RTX 4090\n8\n", "box")
    assert (mixed.gpu, mixed.gpus, mixed.told) == (
        *("NVIDIA GeForce RTX 4090", 1),
        "by nvidia-smi and nproc, without 2 x NVIDIA T400",
    )
    several = ssh_pool("NVIDIA L4\nNVIDIA A40\nNVIDIA A40\n8\n", "box")
    assert (several.gpu, several.gpus) == ("NVIDIA A40", 2)
    with pytest.raises(UsageError, match="does not say"):
        ssh_pool("", "box")


@pytest.mark.parametrize(("status", "gpus"), [(0, 2), (9, 0)])
def test_what_nvidia_smi_says_of_a_failure_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, gpus: int
) -> None:
    """It prints that to stdout."""
    said = "NVIDIA L4\nNVIDIA L4" if status == 0 else "NVIDIA-SMI has failed\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ssh_pool(ask(SMI), "box").gpus == gpus


@pytest.mark.parametrize(
    ("written", "device"),
    [
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("nvidia_a100-pcie-40gb", "A100-40GB"),
        ("h200-141gb", "H200"),
        ("Tesla-V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA-GH200-120GB", "GH200-96GB"),
        ("NVIDIA-A100-SXM4-80GB-SHARED", "A100-80GB-SXM"),
        ("Tesla-T4-SHARED", "T4"),
    ],
)
def test_what_drivers_and_clusters_call_a_device_is_known(written: str, device: str) -> None:
    assert known_device(written) == (device, "")


def test_a_share_of_a_gpu_is_told() -> None:
    shared = node("g", labels={"nvidia.com/gpu.product": "Tesla-T4-SHARED"}, gpus={"nvidia.com/gpu": "4"})
    (pool,), _ = kubernetes_pools(json.dumps({"items": [shared]}), "gke")
    assert pool.told == "1 ready, each of its GPUs a share of one"


def test_entries_are_read_back_and_say_whose_speed_it_is(tmp_path: Path) -> None:
    told: list[str] = []
    pools = [
        Pool("slurm/big", 2, "nvidia_h100_80gb_hbm3", 8, 96, "2 idle"),
        Pool("slurm/big", 1, "h1000", 8, 96, "1 idle"),
        Pool("slurm/big", 1, "", 0, 64, "1 idle"),
        Pool("ssh/Box", 1, "", 2, 4, "by nvidia-smi and nproc", "home"),
    ]
    entry = entry_of(pools, "us", "bucket", told.append)
    (tmp_path / "inventory.yaml").write_text(text := inventory_to_text(entry.inventory, entry.comments))
    found = load_inventory(tmp_path / "inventory.yaml").machines
    assert [
        (one.name, f"{one.accelerators.name}:{one.accelerators.count}", one.nodes, one.region) for one in found
    ] == [
        ("big-h100-sxm", "H100-SXM:8", 2, "us"),
        ("big-cpu", "cpu:96", 1, "us"),
        ("big-cpu-2", "cpu:64", 1, "us"),
        ("box", "cpu:4", 1, "home"),
    ]
    assert "989 TFLOP/s bf16: not measured" in text and "speed guessed" in text
    assert "unknown device 'h1000'; nearest: H100" in told[0] and "unknown device 'h1000'" in text
    assert "2 x GPU: no name of its GPUs" in told[1]
