"""How large a user's own model is: built once, without memory where it allows that, and counted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_cli.config.settings import RunSettings
    from diloco_cli.plan.model_facts import ModelFacts

UNKNOWN_SEQUENCE = 1  # then every batch is a whole number of sequences, and attention costs next to nothing
PRESET_SEQUENCE = 128  # of preset data under a model of one's own


def facts_of(run: RunSettings, folder: Path) -> ModelFacts:
    """The facts of a run's model; `folder` is where modules that the run file names are looked for first."""
    from diloco_cli.plan.model_facts import facts_from_parameters, model_facts

    if run.model.huggingface and not run.model.parameters:
        return _facts_of_huggingface(run.model.huggingface, run.model.sequence, folder)
    if not run.model.entrypoint or run.model.parameters:
        return model_facts(run.model)
    from diloco_cli.algorithm.flat import parameter_facts
    from diloco_cli.tasks.build import build_model_on_meta, search_first

    search_first(folder)
    return facts_from_parameters(parameter_facts(build_model_on_meta(run)), _sequence(run))


def _facts_of_huggingface(name: str, sequence: int | None, folder: Path) -> ModelFacts:
    """From config.json alone, looked for where the processes will look for it."""
    from diloco_cli.config.huggingface import CONFIG, facts_of_config, read_config
    from diloco_cli.plan.model_facts import facts_of_huggingface

    config, place = read_config(name, [folder.absolute(), Path.cwd(), *map(Path, sys.path)])
    return facts_of_huggingface(facts_of_config(config, str(place / CONFIG)), sequence)


def _sequence(run: RunSettings) -> int:
    """What `args` call `sequence`; else what preset data give."""
    named = run.model.args.get("sequence", run.data.args.get("sequence"))
    if isinstance(named, int) and named > 0:
        return named
    return PRESET_SEQUENCE if run.data.preset else UNKNOWN_SEQUENCE
