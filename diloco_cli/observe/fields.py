"""A field of an output, declared once: how it is computed, what it means, its column in the table, its metrics.

A section of an output (`Status`, `LearnerStatus`, a report) is a dataclass whose fields are declared by `Fields`:

    of_learner = Fields[OneLearner]()

    @dataclass(frozen=True)
    class LearnerStatus:
        behind: int = of_learner(
            lambda it: it.heartbeat.behind, "Versions that it has not adopted yet.",
            UnitColumn("BEHIND", lambda row: str(row.behind)), gauge="diloco_learner_behind",
        )

`made` computes a section from its source. JSON and its schema follow from the dataclass; the table of `status`
(screen.py), OpenMetrics (metrics/prometheus.py) and the schema's descriptions read the declarations. (Ruff takes the
call for a default value, RUF009, which it is not.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, cast

Source = TypeVar("Source")
Value = TypeVar("Value")
Section = TypeVar("Section")
KEY = "declared"


@dataclass(frozen=True)
class UnitColumn:
    """A column of the table of units. `text`: of a row; `gives_way`: where the screen is too narrow, columns go in this
    order; None: it always stays."""

    heading: str
    text: Callable[[Any], str]
    gives_way: int | None = None
    left: bool = False


@dataclass(frozen=True)
class Metric:
    """A metric as it is exported. `labels`: beside those of its section; `value`: of the section, if it is not the
    field's value; `states`: one sample for each of these words, 1 for the field's value."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: Mapping[str, str]
    value: Callable[[Any], float | None] | None
    states: tuple[str, ...]

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


@dataclass(frozen=True)
class Declared:
    of: Callable[[Any], Any]
    doc: str
    column: UnitColumn | None
    metric: Metric | None


class Fields(Generic[Source]):
    """Declares fields that are computed from a `Source`."""

    def __call__(
        self,
        of: Callable[[Source], Value],
        doc: str,
        column: UnitColumn | None = None,
        *,
        gauge: str = "",
        counter: str = "",
        labels: Mapping[str, str] = MappingProxyType({}),
        value: Callable[[Any], float | None] | None = None,
        states: tuple[str, ...] = (),
    ) -> Value:
        """`gauge` or `counter`: the name of the metric, if the field is exported; see `Metric`."""
        metric = Metric(gauge or counter, "gauge" if gauge else "counter", labels, value, states)
        declared = Declared(of, doc, column, metric if metric.name else None)
        return cast(Value, field(metadata={KEY: declared}))


def declared(section: type) -> Iterator[tuple[str, Declared]]:
    """(name, declaration) of each field, in order."""
    for each in dataclasses.fields(section):
        if KEY in each.metadata:
            yield each.name, each.metadata[KEY]


def made(section: type[Section], source: object) -> Section:
    return section(**{name: each.of(source) for name, each in declared(section)})
