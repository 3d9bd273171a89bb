"""`diloco config`: every setting of a run as it will be used, and where it came from; JSON Schemas, made of the types
themselves: of run.yaml, of inventory.yaml, and of what `--json` prints. Those of the files lie in templates/schemas."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from json import dumps
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from diloco_cli.cli.output import print_json
from diloco_cli.config.codec import to_plain
from diloco_cli.config.fields import origin_of, schema_of, values_of
from diloco_cli.config.run_file import load_run_with_origins
from diloco_cli.config.settings import Inventory, RunSettings
from diloco_cli.errors import UsageError, suggestion
from diloco_cli.observe.fields import declared

config = typer.Typer(help="Settings of a run.", no_args_is_help=True, rich_markup_mode=None)


@config.command("show")
def show(
    file: Path = typer.Option(Path("run.yaml"), "-f", "--file", help="The run file."),
    overrides: list[str] = typer.Option([], "--set", help="Change one value: key.key=value."),
    origin: bool = typer.Option(False, "--origin", help="Say where each value comes from."),
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Print the settings of a run file, defaults included."""
    run, origins = load_run_with_origins(file, overrides)
    if json:
        print_json("config", {"settings": to_plain(run), "origins": origins})
        return
    for key, value in values_of(run):
        source = f"  # {origin_of(origins, key)}" if origin else ""
        print(f"{key} = {dumps(value)}{source}")


@config.command("schema")
def print_schema(
    name: str = typer.Argument(..., metavar="NAME", help="run, inventory, or a command with --json, such as status."),
) -> None:
    """Print the JSON Schema of run.yaml, of inventory.yaml, or of what a command's --json prints."""
    if name not in NAMES:
        names = ", ".join(NAMES)
        raise UsageError(f"no schema '{name}'{suggestion(name, NAMES)}; allowed: {names}")
    print(dumps(schema(name), indent=1))


DRAFT = "https://json-schema.org/draft/2020-12/schema"
FILES = ("run", "inventory")
Shape = str | dict[str, Any]  # the place of a dataclass, or the types of keys

DRY = {"dry_run": bool}
TOKENS = {
    "url": str,
    "tokens": int,
    "shards": int,
    "dtype": str,
    "vocabulary": int,
    "tokenizer": str | None,
    "digest": str,
}
FAULT = {"run": str, "plan": str, "dry_run": bool, "faults": list[dict[str, Any]]}
SHAPES: dict[str, Shape] = {
    "plan": "diloco_cli.plan.plan:Plan",
    "status": "diloco_cli.observe.status:Status",
    "launch": "diloco_cli.observe.summary:Summary",
    "resume": "diloco_cli.observe.summary:Summary",
    "report": "diloco_cli.report.numbers:Report",
    "doctor": "diloco_cli.doctor.examine:Examination",
    "simulate run": "diloco_cli.forecast.run:RunForecast",
    "simulate goodput": {"rows": list[dict[str, Any]], "constants": dict[str, Any], "fitted": list[Any]},
    "simulate bandwidth": {"rows": list[dict[str, Any]]},
    "verify": {
        "run": str,
        "commits": int,
        "merges": int,
        "epochs": int,
        "tokens": int,
        "offers_applied": int,
        "offers_rejected": int,
        "duplicates": int,
        "missing": int,
        "missing_keys": list[str],
        "mismatches": list[Any],
        "unlisted": int,
        "own_loops": dict[str, str],
        "ok": bool,
    },
    "export": {"run": str, "file": str, "commit": int, "bytes": int},
    "generate": {"run": str, "commit": int, "prompt": str, "text": str, "seed": int, "tokens": int},
    "evaluate": {"run": str, "commit": int, "loss": float | None, "sequences": int},
    "runs": {"runs": list[dict[str, Any]]},
    "runs rm": {"run": str, "url": str, "objects": int},
    "stop": {"run": str, "state": str},
    "rollback": {"run": str, "commit": int, **DRY},
    "gc": {
        "run": str,
        "commit": int,
        "floor_before": int,
        "floor": int,
        "objects": dict[str, int],
        "bytes_about": int,
        **DRY,
    },
    "quarantine": {"run": str, "learner": str, "commit": int},
    "readmit": {"run": str, "learner": str, "commit": int},
    "chaos run": {"run": str, "scenario": str, "seed": int, "faults": list[dict[str, Any]], **DRY},
    "chaos kill": FAULT,
    "chaos pause": FAULT,
    "chaos revive": {"run": str, "target": str, **DRY},
    "chaos preempt": {"run": str, "target": str, "job": str, **DRY},
    "chaos list": {"run": str, "units": list[dict[str, Any]]},
    "data tokenize": TOKENS,
    "data index": TOKENS,
    "data show": {**TOKENS, "checked": bool},
    "key revoke": {"run": str, "keys": list[str], "commit": int},
    "config": {"settings": dict[str, Any], "origins": dict[str, str]},
    "inventory": {"machine": dict[str, Any], "matrix_tflops": dict[str, Any], "inventory": str},
}
LEFT_OUT = {"plan": {"run", "inventory", "model"}, "simulate run": {"warnings"}}  # of the type, in what is printed
OBJECTS = list[dict[str, Any]]
ALSO: dict[str, dict[str, Any]] = {  # keys that a command prints beside its type, most where an option asks for them
    "plan": {
        "digest": str,
        "confirmed": dict[str, Any],
        "not_confirmed": str,
        "rivals": OBJECTS,
        "simulation": dict[str, Any],
        "compared": dict[str, Any],
        "rent": dict[str, Any],
        "frontier": OBJECTS,
        "explanations": OBJECTS,
        "calibration": OBJECTS,
        "changes": list[str],
    },
    "simulate goodput": {"days": float, "seed": int, "seeds": list[int], "wall_s": float},
}
LINES = {"events": "diloco_cli.events.event:Event"}
"""Commands that print an object a line, without an envelope."""
NAMES = (*FILES, *SHAPES, *LINES)


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of this file or of the output of this command."""
    if name in LINES:
        found = _of_type(LINES[name])
    else:
        found = _of_file(name) if name in FILES else _of_output(name)
    return {"$schema": DRAFT, "title": f"diloco {name}", **found}


def _of_file(name: str) -> dict[str, Any]:
    if name == "run":
        return schema_of(RunSettings)
    found = schema_of(Inventory)
    machine = found["properties"]["machines"]["items"]["properties"]
    machine["host"] = machine["hosts"]  # another spelling
    return found


def _of_output(name: str) -> dict[str, Any]:
    """The envelope: `data` is complete where `ok` is true; an error may leave it empty."""
    shape = SHAPES[name]
    data = _of_type(shape) if isinstance(shape, str) else _of_keys(shape)
    definitions = data.pop("$defs", {})
    told = definitions[data["$ref"].rpartition("/")[2]] if "$ref" in data else data
    for key in LEFT_OUT.get(name, ()):
        told["properties"].pop(key, None)
        told["required"] = [name for name in told.get("required", ()) if name != key]
    told["properties"] |= _of_keys(ALSO.get(name, {}))["properties"]
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    error = {
        "type": "object",
        "properties": {"code": {"type": "string"}, "message": {"type": "string"}, "hint": optional},
        "required": ["code", "message", "hint"],
    }
    properties = {
        "format_version": {"type": "string", "pattern": r"^1\.\d+$"},
        "command": {"type": "string"},
        "ok": {"type": "boolean"},
        "generated_at": {"type": "string"},
        "data": {"type": "object"},
        "warnings": {"type": "array", "items": {"type": "string"}},
        "error": {"anyOf": [error, {"type": "null"}]},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "if": {"properties": {"ok": {"const": True}}},
        "then": {"properties": {"data": data, "error": {"type": "null"}}},
        "else": {"properties": {"error": error}},
        "$defs": definitions,
    }


def _of_type(place: str) -> dict[str, Any]:
    """All fields are written, also those that have a default."""
    import msgspec

    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    found: dict[str, Any] = msgspec.json.schema(kind)
    _sort(found)
    for each in found.get("$defs", {}).values():
        if "properties" in each:
            each["required"] = list(each["properties"])
    if isinstance(kind, type) and is_dataclass(kind):
        _describe(kind, found["$defs"])
    return found


def _describe(section: type, definitions: dict[str, Any]) -> None:
    """What the fields mean, as they and those of their sections are declared."""
    for name, each in declared(section):
        definitions[section.__name__]["properties"][name]["description"] = each.doc
    for hint in get_type_hints(section).values():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and is_dataclass(part):
                _describe(part, definitions)


def _sort(node: Any) -> None:
    """Alternatives, whose order differs from process to process."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, (dict, list)):
            _sort(child)
    for key in ("enum", "anyOf") if isinstance(node, dict) else ():
        if isinstance(node.get(key), list):
            node[key].sort(key=json.dumps)


def _of_keys(shape: Mapping[str, Any]) -> dict[str, Any]:
    import msgspec

    properties = {key: msgspec.json.schema(kind) for key, kind in shape.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
