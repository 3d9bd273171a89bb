"""What a prediction rests on, each statement marked guessed, catalogue or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diloco_cli.config.settings import IslandSettings, RunSettings
from diloco_cli.plan.candidates import Candidate
from diloco_cli.plan.goodput import GUESSED_RESTART_S
from diloco_cli.plan.model_facts import ModelFacts
from diloco_cli.plan.plan import Assumption
from diloco_cli.units import format_count, format_duration


def assumptions(run: RunSettings, kept: Sequence[Candidate], model: ModelFacts) -> tuple[Assumption, ...]:
    """Speeds first, then what the inventory does not say, then what holds of every plan."""
    islands = [candidate.island for candidate in kept]
    guesses = [
        _about(
            "no link given, taken as fast enough",
            (i for i in islands if not (i.link.up_bps and i.link.down_bps)),
        ),
        _about("no mtbf given, taken as never failing", (i for i in islands if i.mtbf_s is None)),
        _about(
            f"no restart given, taken as {format_duration(GUESSED_RESTART_S)}",
            (i for i in islands if i.mtbf_s is not None and i.restart_s is None),
        ),
    ]
    if run.model.preset is None:
        guesses.append(f"model: {format_count(model.embedding_parameters)} of the parameters are its embedding")
    if run.model.entrypoint and not run.model.parameters:
        guesses.append(
            f"model: {format_count(model.parameters)} parameters, as {run.model.entrypoint} builds them; from their"
            f" names and shapes {model.layers} layers of width {model.width}; sequences of {model.sequence} tokens"
        )
    guesses.append("memory: float32 weights, gradients and AdamW; one sequence a device at a time")
    guesses.append("islands fail independently of each other")
    return (
        *(candidate.speed.assumption for candidate in kept),
        *(Assumption(text, "guessed") for text in guesses if text),
    )


def _about(text: str, islands: Iterable[IslandSettings]) -> str:
    names = [island.name for island in islands]
    return f"{', '.join(names)}: {text}" if names else ""
