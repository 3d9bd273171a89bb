"""The fake GCS and the fault proxy as processes of their own, as studies start them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from diloco_cli.store.open import open_store
from diloco_cli.store.port import Created, StoreUnavailableError
from tests.contract.emulators import environment, server
from tests.contract.faults import CONTROL_PATH, Faults


def control(url: str, **wanted: object) -> dict[str, Any]:
    request = urllib.request.Request(url + CONTROL_PATH, json.dumps(wanted).encode() if wanted else None)
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_proxy_process_before_a_fake_gcs_process_breaks_what_it_is_told_to() -> None:
    with server("fake_gcs", "one", "two") as gs, server("fault_proxy", "--upstream", gs) as proxy:
        with environment({"STORAGE_EMULATOR_HOST": proxy}):
            store = open_store("gs://two/runs")
            assert store.create("k", b"x") == Created()
            control(proxy, inject="503", times=1)
            with pytest.raises(StoreUnavailableError):
                store.get("k")
            assert store.get("k") == b"x"
            control(proxy, outage_s=60)
            with pytest.raises(StoreUnavailableError):
                store.get("k")
            control(proxy, heal=True)
            assert store.get("k") == b"x"
        counts = control(proxy)
    assert counts["struck"] == {"503": 2}
    assert counts["requests"] == 5


def test_a_fake_gcs_process_takes_rates_and_outages_from_its_command_line() -> None:
    with server("fake_gcs", "--rates", '{"503": 1.0}') as url, pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}/storage/v1/b/bucket", timeout=20)
    with server("fake_gcs", "--outage", "0:60") as url:
        assert control(url)["struck"] == {}
        with pytest.raises(urllib.error.HTTPError, match="503"):
            for _ in range(100):  # the outage begins a moment after the start
                urllib.request.urlopen(f"{url}/storage/v1/b/bucket", timeout=20)


@pytest.mark.parametrize("rates", [{"504": 0.1}, {"503": -0.1}, {"503": 0.9, "stall": 0.2}])
def test_rates_that_make_no_sense_are_refused(rates: Any) -> None:
    with pytest.raises(ValueError, match=r"faults|probabilities"):
        Faults(lambda status: None).set_rates(rates)  # type: ignore[arg-type,return-value]
