"""Which sequences are held out, and whether tokens fit a model and its run: said by `plan`, which does without numpy,
and by every process before it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import UsageError

if TYPE_CHECKING:
    from diloco_cli.corpus.shuffle import Numbers

LARGEST_GROUP = 16  # sequences
SMALLEST_SHARE = 1e-6
LEAST_GROUPS = 64  # held-out groups, before they are made longer than one sequence


@dataclass(frozen=True)
class Split:
    """Of `size` sequences; `share` of them are held out: the last of every `period` groups of neighbours. They are
    spread evenly, so they are like the whole corpus; few of them touch one that is trained on."""

    size: int
    share: float

    @property
    def period(self) -> int:
        """In groups."""
        return max(2, round(1 / max(self.share, SMALLEST_SHARE))) if self.share else 0

    @property
    def group(self) -> int:
        """Sequences in a group."""
        return min(LARGEST_GROUP, max(1, int(self.size * self.share) // LEAST_GROUPS))

    @property
    def held_out(self) -> int:
        """How many sequences are held out."""
        return self.size // (self.period * self.group) * self.group if self.share else 0

    @property
    def train(self) -> int:
        return self.size - self.held_out

    def trained(self, numbers: Numbers) -> Numbers:
        """Sequence number n of those trained on -> its number in the stream. What is left after the last whole period
        is trained on."""
        if not self.held_out:
            return numbers
        spans = numbers // ((self.period - 1) * self.group)
        found: Numbers = numbers + spans.clip(max=self.held_out // self.group) * self.group
        return found

    def evaluated(self, count: int) -> list[int]:
        """At most `count` of the held-out sequences, the same every time: whole groups, spread evenly."""
        groups = self.held_out // self.group
        wanted = min(groups, -(-count // self.group))
        chosen = [place * groups // wanted for place in range(wanted)]
        last = (self.period - 1) * self.group
        found = [(g * self.period * self.group) + last + member for g in chosen for member in range(self.group)]
        return found[:count]


def split_of(tokens: int, sequence: int, held_out: float) -> Split:
    """The sequences of a stream; each ends with the first token of its successor."""
    return Split((tokens - 1) // sequence, held_out)


def refuse_misfit(run: RunSettings, tokens: int, symbols: int, sequence: int, vocabulary: int | None) -> None:
    """Raises UsageError for a stream of `tokens` that are below `symbols`, if the model's `vocabulary` (None: only its
    own code knows it) has fewer, or if they are too short for what is to be held out."""
    if vocabulary is not None and symbols > vocabulary:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} is too small: the data have tokens up to {symbols - 1}",
            where="model",
            hint=f"a preset takes another: --set model.vocabulary={symbols}; or tokenize by the model's own tokenizer",
        )
    split, wanted = split_of(tokens, sequence, run.data.held_out), run.evaluation.sequences
    if split.held_out < wanted <= split.size // 4:
        share = min(0.5, 1.5 * wanted / split.size)
        raise UsageError(
            f"the held-out part is too small: {split.held_out} sequences of {sequence}, and evaluation.sequences"
            f" is {wanted}",
            where="data.held_out",
            hint=f"--set data.held_out={share:.2g}, or --set evaluation.sequences={max(1, split.held_out)}",
        )
    if split.held_out < wanted:
        raise UsageError(
            f"the data are too short: {split.size} sequences of {sequence} tokens, of which {wanted} are to be"
            " held out (evaluation.sequences)",
            where="data",
            hint=f"add data, or --set evaluation.sequences={max(1, split.size // 8)} --set data.held_out=0.2",
        )
