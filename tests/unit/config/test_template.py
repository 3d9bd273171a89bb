"""templates/run.yaml and the schemas are written from the settings: `python -m tests.unit.config.test_template`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import pytest

from diloco_cli.cli.config import FILES, schema
from diloco_cli.config.fields import Field, Settings, fields_of
from diloco_cli.config.run_file import load_run
from diloco_cli.config.settings import RunSettings

TEMPLATES = Path(__file__).parents[3] / "templates"
HEAD = "# What to train, and how the islands exchange. `diloco launch run.yaml` starts it."
VALUES = {  # that a long run on several machines has in place of the defaults
    "inventory": "inventory.yaml",
    "model": "{preset: gpt-small}",
    "data": "{preset: python-stdlib}",
    "train.tokens": "20B",
    "sync.every": "240",
}
LEFT_OUT = ("train.inner.decay",)  # has an effect on one schedule alone
COMMENT_COLUMN, WIDTH = 44, 120


def template() -> str:
    return "\n".join([HEAD, *lines(RunSettings("first-run"), "", ""), ""])


def lines(settings: Settings, path: str, indent: str) -> Iterator[str]:
    for key, field in fields_of(type(settings)).items():
        place, value = f"{path}{key}", getattr(settings, field.name)
        if place in LEFT_OUT:
            continue
        if not indent and isinstance(value, Settings):
            yield ""
        if isinstance(value, Settings) and place not in VALUES:
            yield f"{indent}{key}:"
            yield from lines(value, f"{place}.", f"{indent}  ")
            continue
        about, entry = field.meta["description"], f"{indent}{key}: {VALUES.get(place) or written(value, field)}"
        if isinstance(value, Settings):
            yield from (f"# {line}" for line in wrap(about, WIDTH - 2, break_on_hyphens=False))
            yield entry
        else:
            yield from commented(entry, about)


def written(value: Any, field: Field) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} s" if field.name != field.key and value not in field.words else text


def commented(entry: str, about: str) -> Iterator[str]:
    first, *rest = wrap(about, WIDTH - COMMENT_COLUMN - 4, break_on_hyphens=False)
    yield f"{entry:<{COMMENT_COLUMN - 1}} # {first}"
    yield from (f"{'':<{COMMENT_COLUMN - 1}} #   {line}" for line in rest)


def test_the_template_is_written_from_the_settings(tmp_path: Path) -> None:
    assert (TEMPLATES / "run.yaml").read_text() == template()
    path = tmp_path / "run.yaml"
    path.write_text(template())
    run = load_run(path)
    assert (run.name, run.train.tokens, run.sync.every) == ("first-run", 20_000_000_000, 240)
    assert run.evaluation == RunSettings("first-run").evaluation


@pytest.mark.parametrize("name", FILES)
def test_the_schemas_in_templates_are_those_of_today(name: str) -> None:
    assert json.loads((TEMPLATES / "schemas" / f"{name}.json").read_text()) == schema(name)


if __name__ == "__main__":
    (TEMPLATES / "run.yaml").write_text(template())
    for name in FILES:
        (TEMPLATES / "schemas" / f"{name}.json").write_text(json.dumps(schema(name), indent=1) + "\n")
