"""A history in words: what was written, shortened to what a reader needs."""

from __future__ import annotations

import json
import re
from typing import Any

from diloco_cli.digests import digest
from diloco_cli.histories.options import REGION
from diloco_cli.histories.outcome import HistoryResult, Moment

_HEX = re.compile(r"(-[a-z0-9]+-[0-9a-f]{8})[0-9a-f]{56}")


def told(outcome: HistoryResult, last: int) -> list[str]:
    """The last so many moments."""
    return [_line(moment, outcome.objects) for moment in outcome.tail[-last:]]


def trace_of(outcome: HistoryResult) -> str:
    """A digest of everything that happened and of all that was written."""
    happened = [f"{when_s!r} {text} {key}" for when_s, text, key in outcome.tail]
    lies = [f"{key} {digest(data)}" for key, data in sorted(outcome.objects.items())]
    return digest("\n".join([*happened, *lies, str(outcome.violation)]).encode())


def _line(moment: Moment, objects: dict[str, bytes]) -> str:
    when_s, text, key = moment
    said = _said(key, objects.get(key, b""))
    return _HEX.sub(r"\1", f"{when_s:.3f} s  {text} {key}{said}".rstrip())


def _said(key: str, data: bytes) -> str:
    kind = key.removeprefix(f"{REGION}/").partition("/")[0]
    if kind not in ("commit", "offer"):
        return ""
    try:
        record = json.loads(data)
    except ValueError:
        return ": damaged"
    return f": {_commit(record) if kind == 'commit' else _offer(record)}"


def _offer(offer: dict[str, Any]) -> str:
    return f"fragment {offer['fragment']} on version {offer['base']}, data {offer['data_start']}-{offer['data_end']}"


def _commit(commit: dict[str, Any]) -> str:
    parts = [commit["kind"]]
    parts += [f"slot {commit['slot']}"] if "slot" in commit else []
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']}" for item in commit.get("inputs", ())]
    parts += [f"{item['learner']} {item['incarnation']}/{item['seq']} {item['reason']}" for item in commit["outcomes"]]
    return ", ".join(parts)
