"""Named trials, run on a few processes; each finished one is a line of a JSONL file, so that a run can be interrupted
and goes on where it stood."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from methods.trial import Trial, run_trial
from msgspec import NODEFAULT, Struct, structs


@dataclass(frozen=True)
class Named:
    """A trial and where it belongs in the tables. Only the trial decides whether a line of the file is its result."""

    labels: dict[str, Any]
    trial: Trial

    @property
    def key(self) -> str:
        plain = json.dumps(stated(self.trial), sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:12]


def stated(value: Any) -> Any:
    """A dataclass or Struct as plain values, without defaults: what a later version adds makes no result old."""
    if is_dataclass(value) and not isinstance(value, type):
        set_by_us = [item for item in fields(value) if getattr(value, item.name) != default_of(item)]
        return {item.name: stated(getattr(value, item.name)) for item in set_by_us}
    if isinstance(value, Struct):
        written = [(item, getattr(value, item.name)) for item in structs.fields(value)]
        return {item.name: stated(one) for item, one in written if one != struct_default_of(item)}
    if isinstance(value, (list, tuple)):
        return [stated(item) for item in value]
    return value


def default_of(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def struct_default_of(item: structs.FieldInfo) -> Any:
    return item.default if item.default_factory is NODEFAULT else item.default_factory()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Key -> line. A torn last line, of an interruption, does not count."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["key"]] = row
    return found


def finished(wanted: list[Named], path: Path) -> list[dict[str, Any]]:
    """The lines of what is wanted and there, in the order of the wanted."""
    done = read(path)
    return [{**done[named.key], "labels": named.labels} for named in wanted if named.key in done]


def complete(wanted: list[Named], path: Path, jobs: int) -> None:
    """Run what the file does not have yet."""
    done = read(path)
    missing = list({named.key: named for named in wanted if named.key not in done}.values())
    say(f"{len(wanted)} trials, {len(missing)} to run on {jobs} processes")
    for row in _run(missing, jobs):
        with path.open("a") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        labels = " ".join(str(value) for value in row["labels"].values())
        say(f"{labels}: loss {row['loss']:.4f}, {row['wall_s']:.0f} s")


def _run(missing: list[Named], jobs: int) -> Iterable[dict[str, Any]]:
    """As they finish. One job alone needs no process of its own."""
    if jobs == 1:
        yield from map(_one, missing)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_one, named) for named in missing]):
            yield future.result()


def _one(named: Named) -> dict[str, Any]:
    outcome = asdict(run_trial(named.trial))
    curve = [[tokens, round(loss, 4)] for tokens, loss in outcome.pop("curve")]
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in outcome.items()}
    return {"key": named.key, "labels": named.labels, **rounded, "wall_s": round(outcome["wall_s"], 1), "curve": curve}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
