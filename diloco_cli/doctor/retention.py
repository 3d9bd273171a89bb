"""What a bucket does with deleted objects, what that costs a run, and whether it checks what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType

from diloco_cli.doctor.place import Place, noise
from diloco_cli.doctor.verdicts import Finding, passed, skipped, warned
from diloco_cli.errors import StoreError
from diloco_cli.store.open import StoreUrl, parse_url
from diloco_cli.store.port import StoreForbiddenError
from diloco_cli.units import format_duration, format_size

DAY_S = 86_400.0
STORAGE_PRICE_PER_GB_MONTH = 0.02
"""US dollars; standard storage in the cheaper regions of the public price lists."""
EXAMPLE_GB_PER_DAY = 100.0
CLIENTS = {"gs": "gcsfs", "s3": "s3fs"}
"""Packages that speak a cloud's own interface; a run may do without them (obstore)."""
OWN_DIGESTS = "every record and payload carries the run's own digest, which its readers check"

Examiner = Callable[[Place], Finding]


@dataclass(frozen=True)
class Retention:
    """How long a bucket keeps deleted objects, and bills them; 0: not at all, None: until somebody removes them.
    `turn_off` is a command."""

    kept_s: float | None
    turn_off: str


def bucket_checks(url: str, written_gb_per_day: float | None) -> dict[str, Examiner]:
    """The further checks of the store at `url`, by name. `written_gb_per_day`: what a run would write there."""
    parsed = parse_url(url)
    if parsed.scheme not in CLIENTS or find_spec(CLIENTS[parsed.scheme]) is None:
        return {"checksum": lambda place: passed(OWN_DIGESTS)}
    client = _client(parsed)
    name = "soft_delete" if parsed.scheme == "gs" else "versioning"
    return {
        "checksum": lambda place: checksum(place, partial(client.takes_damage, parsed.place)),
        name: lambda place: retention(place, partial(client.retention_of, parsed.place), written_gb_per_day),
    }


def checksum(place: Place, takes_damage: Callable[[str, bytes], bool]) -> Finding:
    """An upload whose checksum does not fit its bytes must be refused, and leave nothing. `takes_damage(name, data)`
    tries that and tells whether the store took it."""
    key = "checksum/wrong"
    name = f"{parse_url(place.prefix_url).prefix}/{key}"
    with place.writing(key):
        taken = place.patiently("upload", lambda: takes_damage(name, noise("checksum", 1000)))
    if taken or place.store.get(key) is not None:
        return warned("a damaged upload was accepted", f"a run still notices: {OWN_DIGESTS}")
    return passed("a damaged upload is refused")


def retention(place: Place, read: Callable[[], Retention], written_gb_per_day: float | None) -> Finding:
    """Knowing it takes a permission that a run does not need: without it the check is skipped."""
    try:
        return retention_finding(place.patiently("look", read), written_gb_per_day)
    except StoreForbiddenError:
        return skipped("these credentials may not read the bucket's settings")
    except StoreError as error:
        return skipped(f"the bucket does not tell: {error}")


def retention_finding(retention: Retention, written_gb_per_day: float | None) -> Finding:
    """A run that collects its garbage deletes about as much as it writes, so that the bucket holds, and bills, what
    was written in `kept_s` on top of what the run needs."""
    if retention.kept_s == 0:
        return passed("what is deleted is gone, and not billed")
    hint = f"a run deletes nearly all that it writes; to turn it off: {retention.turn_off}"
    if retention.kept_s is None:
        return warned("what is deleted stays, and is billed, until somebody removes it", hint)
    kept = f"what is deleted is kept, and billed, for {format_duration(retention.kept_s)}"
    if written_gb_per_day is None:
        monthly = monthly_cost(EXAMPLE_GB_PER_DAY, retention.kept_s)
        return warned(f"{kept}: ${monthly:,.2f} a month for each 100 GB a day that a run writes", hint)
    monthly = monthly_cost(written_gb_per_day, retention.kept_s)
    return warned(f"{kept}: ${monthly:,.2f} a month for this run's {format_size(1e9 * written_gb_per_day)} a day", hint)


def monthly_cost(written_gb_per_day: float, kept_s: float) -> float:
    """US dollars a month for the deleted objects that the bucket still holds. 100 GB a day kept for 7 days: 700 GB,
    $14."""
    return written_gb_per_day * kept_s / DAY_S * STORAGE_PRICE_PER_GB_MONTH


def _client(parsed: StoreUrl) -> ModuleType:
    """Loaded where it is needed: clouds' clients take their time."""
    if parsed.scheme == "gs":
        from diloco_cli.doctor import gcs_bucket

        return gcs_bucket
    from diloco_cli.doctor import s3_bucket

    return s3_bucket
