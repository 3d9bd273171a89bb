"""Says which tensors of a file of weights are not those of a model."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_cli.errors import UsageError

SHOWN = 5  # names in an error


def misshapen(name: str, there: Iterable[int], here: Iterable[int]) -> str:
    """A name with its shape in the file, and in the model."""
    return f"{name} {list(there)}, not {list(here)}"


def refuse_other_model(
    where: str, missing: Iterable[str], unexpected: Iterable[str], of_another_shape: Iterable[str]
) -> None:
    """Raises UsageError if there are any, and names them."""
    found = {
        "missing": sorted(missing),
        "unexpected": sorted(unexpected),
        "of another shape": sorted(of_another_shape),
    }
    said = [f"{what}: {_some(names)}" for what, names in found.items() if names]
    if said:
        raise UsageError(
            f"the weights are not those of this model; {'; '.join(said)}",
            where=where,
            hint="the file and the model must have the same parameters, names and shapes",
        )


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
