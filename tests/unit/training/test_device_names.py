"""Which device a name means, and which names are refused."""

from __future__ import annotations

import pytest
import torch

from diloco_cli.config.devices import catalogue, find_device
from diloco_cli.errors import UsageError
from diloco_cli.plan.speed import Precision, computes_in_half
from diloco_cli.training.devices import choose_device, host_threads, kind_of
from diloco_cli.training.inner import runs_in_bf16


@pytest.mark.parametrize(
    ("name", "kind"),
    [("cpu", "cpu"), ("CPU:0", "cpu"), ("mps", "mps"), ("Apple-M4-Max", "mps")]
    + [(name, "cuda") for name in ("cuda", "cuda:3", "H100", "h100-80gb", "MI300X")],
)
def test_devices_are_known_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("name", ["TPU-v5p", "Trainium2", "Gaudi3"])
def test_what_torch_alone_does_not_drive_is_refused_with_the_reason(name: str) -> None:
    reason = rf"{name} is one of torch's (xla|neuron|hpu) devices, .* allowed: cpu, mps, cuda"
    with pytest.raises(UsageError, match=reason) as refused:
        choose_device(name)
    assert "--device cpu" in (refused.value.hint or "")


@pytest.mark.parametrize("name", ["xla", "tpu", "H1000", "cuda:x", "cpux", "vulkan"])
def test_what_is_unknown_is_refused_and_never_taken_for_cuda(name: str) -> None:
    with pytest.raises(UsageError, match=r"no device .* allowed: cpu, mps, cuda"):
        choose_device(name)


def test_every_device_of_the_catalogue_is_of_a_kind_or_refused() -> None:
    for name in catalogue().devices:
        if name.startswith(("TPU", "Trainium", "Gaudi")):
            with pytest.raises(UsageError, match="on which learners do not train"):
                kind_of(name)
        else:
            assert kind_of(name) == ("mps" if name.startswith("Apple") else "cuda")


def test_a_device_that_torch_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"H100 needs cuda, which torch .* does not see"):
        choose_device("H100")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("H100") == torch.device("cuda:0") and choose_device("cuda:1") == torch.device("cuda:1")


def test_codecs_beside_accelerators_share_the_hosts_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, devices, threads in [(2, 0, 2), (64, 8, 8), (96, 1, 16), (4, 8, 1)]:
        monkeypatch.setattr("diloco_cli.training.devices.usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert host_threads() == threads


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
@pytest.mark.parametrize(("name", "capability"), [("cpu", None), ("T4", (7, 5)), ("H100", (9, 0))])
def test_plan_and_learner_compute_in_the_same_type(
    name: str, capability: tuple[int, int] | None, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    device = torch.device("cpu" if capability is None else "cuda:0")
    assert runs_in_bf16(precision, device) == computes_in_half(find_device(name, {}), precision)
