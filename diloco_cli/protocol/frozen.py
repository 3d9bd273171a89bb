"""Changed copies of frozen records, for where it is done by the thousand: folding a log does it several times a commit.

`replace` is `dataclasses.replace`, to the type checker too, but copies the fields as they are instead of calling
`__init__`, which takes seven times as long for a RunState. So it is for records without `__post_init__`, slots and
cached properties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace
else:

    def replace(record: Any, /, **changes: Any) -> Any:
        """An equal record but for the changes. Raises TypeError for a field that it does not have."""
        copy = object.__new__(type(record))
        values = copy.__dict__
        values |= record.__dict__
        num_fields = len(values)
        values |= changes
        if len(values) != num_fields:
            unknown = sorted(changes.keys() - record.__dict__.keys())
            raise TypeError(f"{type(record).__name__} has no field {unknown[0]!r}")
        return copy


__all__ = ["replace"]
