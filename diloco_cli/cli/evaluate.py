"""`diloco evaluate`: what the newest committed parameters are worth, on held-out data or on tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli.consent import AllowCode, AllowStore, named_here
from diloco_cli.cli.export import at_head
from diloco_cli.cli.generate import DeviceOption, TokenizerOption, causal_of
from diloco_cli.cli.output import print_json, progress, table
from diloco_cli.cli.run_argument import OpenRun, RunArgument, open_run
from diloco_cli.environment import set_environment_default
from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.runtime.consent import NamedHere


def evaluate(
    run: str | None = RunArgument,
    tasks: str | None = typer.Option(
        None, "--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness. Default: the run's held-out data."
    ),
    include_path: Path | None = typer.Option(
        None, "--include-path", metavar="FOLDER", help="With --tasks: folder with tasks of your own."
    ),
    limit: int | None = typer.Option(
        None, "--limit", min=1, help="So many examples of each task, or held-out sequences. Default: all, or as the run"
        " evaluates.",
    ),
    tokenizer: str | None = TokenizerOption,
    device: str = DeviceOption,
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:  # fmt: skip
    """Evaluate the newest committed parameters: the held-out loss, or with --tasks what lm-evaluation-harness says."""
    if tasks is None:
        if include_path is not None or tokenizer is not None:
            raise UsageError("--include-path and --tokenizer belong to tasks", hint="add --tasks NAME,...")
        _say_loss(open_run(run), limit, device, as_json, named_here(allow_code, allow_store))
        return
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UsageError("--tasks names no task", hint="--tasks hellaswag,arc_easy")
    if include_path is not None and not include_path.is_dir():
        raise UsageError(
            f"no folder {include_path}", where="--include-path", hint="a folder with the tasks' YAML files"
        )
    if not sys.stderr.isatty():
        set_environment_default("TQDM_DISABLE", "1")
    _say_tasks(open_run(run), names, include_path, limit, tokenizer, device, as_json, allow_code)


def _say_loss(opened: OpenRun, limit: int | None, device: str, as_json: bool, here: NamedHere) -> None:
    from diloco_cli.inference.generation import load_model
    from diloco_cli.protocol.log.states import RunPhase
    from diloco_cli.runtime.consent import consented
    from diloco_cli.syncer.evaluation import FINAL_FACTOR, held_out_loss
    from diloco_cli.tasks.build import build_data
    from diloco_cli.training.devices import choose_device

    where = choose_device(device)
    run = consented(opened.format, opened.url, here)
    with progress(f"evaluating the parameters of {opened.name}"):
        state, model = at_head(opened, lambda state: load_model(run, state, opened.store, where))
        factor = FINAL_FACTOR if state.phase is RunPhase.FINISHED else 1
        sequences = limit or run.settings.evaluation.sequences * factor
        loss = held_out_loss(model, build_data(run.settings, ("held_out",)), sequences)
    finite = loss if abs(loss) < float("inf") else None
    if as_json:
        print_json("evaluate", _facts(opened, state.n) | {"loss": finite, "sequences": sequences})
    else:
        said = "not finite" if finite is None else f"{loss:.4f} nats per token"
        print(f"run {opened.name}, commit {state.n}: held-out loss {said}, over at most {sequences:,} sequences")


def _say_tasks(
    opened: OpenRun, names: list[str], folder: Path | None, limit: int | None, tokenizer: str | None, device: str,
    as_json: bool, allow_code: list[str],
) -> None:  # fmt: skip
    from diloco_cli.inference.harness import evaluate_tasks

    commit, model, vocabulary = causal_of(opened, tokenizer, device, allow_code)
    found = evaluate_tasks(model, vocabulary, names, folder, limit)
    if as_json:
        print_json("evaluate", _facts(opened, commit) | {"tasks": found})
        return
    print(f"run {opened.name}, commit {commit}")
    rows = [(task, name, f"{value:.4f}") for task, figures in found.items() for name, value in figures.items()]
    print("\n".join(table([("TASK", "METRIC", "VALUE"), *rows], left=(0, 1))))


def _facts(opened: OpenRun, commit: int) -> dict[str, Any]:
    return {"run": opened.name, "commit": commit, "loss": None, "sequences": 0, "tasks": {}}
