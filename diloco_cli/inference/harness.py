"""A run's model for lm-evaluation-harness (the extra `eval`), which asks how likely texts are, and for texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco_cli.errors import DilocoError, UsageError, suggestion
from diloco_cli.inference.generation import Causal, Draw, finite, sample
from diloco_cli.inference.vocabulary import TextStream, Vocabulary
from diloco_cli.paths import install_hint

MAX_LOGITS = 1 << 27  # of one forward pass: half a GB in float32
MAX_GENERATED = 256  # tokens, where a task says nothing
RESAMPLES = 1000  # for the standard errors of figures that have no formula for it
Pair = tuple[list[int], list[int]]  # what stands before, and what comes then


class HarnessModel:
    """What the harness asks of a model. Its own class is the other base, as far as this one does not say."""

    def __init__(self, model: Causal, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._model, self._vocabulary = model, vocabulary

    @property
    def eot_token_id(self) -> int:
        """What an empty context is replaced by."""
        return self._vocabulary.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokens = self._vocabulary.encode(string, add_special_tokens is not False)
        self._model.check(tokens)
        return tokens

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
        """As the other base does it, without a bar of its own."""
        return super().loglikelihood(requests, disable_tqdm=True)  # type: ignore[misc]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.scores([(before or [self.eot_token_id], then) for _, before, then in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log likelihood of whole texts, in windows of the model's context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.eot_token_id, self._model.context, 1)
            pairs = [(list(before), list(then)) for before, then in map(make_disjoint_window, windows)]
            found.append(sum(score for score, _ in self.scores(pairs)))
        return found

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        return [self._written(*request.args) for request in requests]

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Of each pair the log likelihood of what comes then, in nats, and whether it is what the model finds likeliest
        token by token. What does not fit into the context is left out, the oldest first."""
        found: dict[int, tuple[float, bool]] = {}
        for rows in self._batches(pairs):
            shown = [self._shown(pairs[row]) for row in rows]
            logits = finite(self._model.logits([tokens for tokens, _ in shown]))
            for row, (tokens, targets), every in zip(rows, shown, logits, strict=True):
                end = len(tokens)
                chances = every[end - len(targets) : end].log_softmax(dim=-1)
                wanted = torch.tensor(targets)
                total = float(chances.gather(1, wanted[:, None]).double().sum())
                found[row] = (total, bool((chances.argmax(dim=-1) == wanted).all()))
        return [found.get(row, (0.0, True)) for row in range(len(pairs))]  # nothing to foretell is no surprise

    def _shown(self, pair: Pair) -> Pair:
        """What the model sees, and the tokens that it has to foretell at its last places."""
        before, then = pair
        tokens = [*before, *then][-self._model.context - 1 :]
        return tokens[:-1], then[-(len(tokens) - 1) :]

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[int]]:
        """Numbers of pairs, the longest first, as many as fit into one pass."""
        order = sorted(
            (row for row in range(len(pairs)) if pairs[row][1]), key=lambda row: -len(self._shown(pairs[row])[0])
        )
        while order:
            longest = len(self._shown(pairs[order[0]])[0])
            count = max(1, MAX_LOGITS // (longest * self._model.vocabulary))
            yield order[:count]
            order = order[count:]

    def _written(self, prompt: str, wishes: dict[str, Any]) -> str:
        """Text up to the first of the ends that the task wants."""
        until = wishes.get("until") or []
        ends = [until] if isinstance(until, str) else list(until)
        temperature = float(wishes.get("temperature") or 0.0) if wishes.get("do_sample") else 0.0
        draw = Draw(temperature, int(wishes.get("top_k") or 0))
        count = int(wishes.get("max_gen_toks") or MAX_GENERATED)
        tokens, stream, text = self.tok_encode(prompt) or [self.eot_token_id], TextStream(self._vocabulary), ""
        for token in sample(self._model, tokens, count, draw, self._vocabulary.size):
            if token == self._vocabulary.end:
                break
            text += stream.add(token)
            if any(end in text for end in ends):
                break
        else:
            text += stream.rest()
        return text[: min((text.index(end) for end in ends if end in text), default=len(text))]


def evaluate_tasks(
    model: Causal, vocabulary: Vocabulary, tasks: list[str], folder: Path | None, limit: int | None
) -> dict[str, dict[str, float]]:
    """The figures of each task, by their names in the harness. `folder`: with tasks of one's own; `limit`: so many
    examples of each. Raises UsageError for a task that is not known, or cannot be had."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UsageError(
            "tasks need lm-evaluation-harness, which is not installed here", where="--tasks", hint=install_hint("eval")
        ) from error
    manager = _manager(TaskManager, tasks, folder)
    _refuse_unknown(tasks, manager.all_tasks)
    judge: Any = type("RunModel", (HarnessModel, TemplateLM), {})(model, vocabulary)
    try:
        found = simple_evaluate(
            judge, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False, bootstrap_iters=RESAMPLES
        )
    except DilocoError:
        raise
    except Exception as error:  # of the harness, of a task's own code, or of what loads its data
        raise UsageError(
            f"the tasks cannot be evaluated: {type(error).__name__}: {error}",
            where="--tasks",
            hint="see where with DILOCO_DEBUG=1; data of a task may have to be fetched while the Hub can be reached",
        ) from error
    return {task: _numbers(figures) for task, figures in (found or {"results": {}})["results"].items()}


def _manager(kind: Any, tasks: list[str], folder: Path | None) -> Any:
    """Of the tasks in the folder, if those are all; else of the harness's own as well, whose index takes it seconds."""
    if folder is None:
        return kind()
    own = kind(include_path=str(folder), include_defaults=False)
    return own if set(tasks) <= set(own.all_tasks) else kind(include_path=str(folder))


def _refuse_unknown(tasks: list[str], known: list[str]) -> None:
    for task in tasks:
        if task not in known:
            raise UsageError(
                f"no task {task!r} is known{suggestion(task, known)}",
                where="--tasks",
                hint="lm_eval ls tasks; tasks of your own: --include-path FOLDER",
            )


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    """Without filters' names (`acc,none` is `acc`), and without what is no number, such as an error that is unknown."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
