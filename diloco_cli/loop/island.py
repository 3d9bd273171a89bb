"""What a user's loop holds of its island: where its data begins, and one call after each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from diloco_cli.errors import DilocoError, FencedError, RunFailedError, TryAgainError, UsageError
from diloco_cli.loop.exchange import LoopExchange
from diloco_cli.loop.loader_state import StatefulLoader
from diloco_cli.loop.sampler import ShardSampler
from diloco_cli.protocol.actors.ports import Stepped

if TYPE_CHECKING:
    from diloco_cli.config.hardware import DataClass

DRAIN_S = 30.0


class LoopIsland:
    """An island of a run, inside the loop that trains it. Use it from one thread.

    `shard` of `num_shards`, `position`: where the loop's data begins, in tokens into its shard; `position` goes on with
    every step. `progress` in [0, 1]: how far the run is, for the loop's own schedules. `moments_lost`: the optimizer's
    state before this process could not be restored, so a warm-up is due. `over`: there is nothing more to train.
    """

    def __init__(self, exchange: LoopExchange, optimizer: torch.optim.Optimizer, data: DataClass) -> None:
        self._exchange, self.data = exchange, data
        self.name, self._most = exchange.island.name, exchange.island.batch_tokens
        self.shard, self.num_shards = exchange.run.shard_of(self.name), exchange.run.num_shards
        self.position, self.progress, self.moments_lost = 0, 0.0, False
        self.over = False
        self._tokens = self._steps = self._behind = 0
        self._hook = optimizer.register_step_post_hook(self._count)
        with self._failing():
            self._go_on(None)

    @property
    def tokens_left(self) -> int:
        """Tokens that the run's islands together still have to merge, by the newest known commit."""
        run, progress = self._exchange.run, self._exchange.learner.progress
        return max(0, run.settings.train.tokens - int(progress.head_tokens))

    def step(self, *, tokens: int, loss: float | torch.Tensor | None = None, skipped: bool = False) -> bool:
        """To be called after each optimizer step, with the tokens that it took: offers what the island has learned, and
        takes over what the others have. True once the run is over.

        A call without an optimizer step since the last one only adds its tokens, as gradients are accumulated, unless
        `skipped` says that the optimizer left its step out (as a GradScaler does). Raises UsageError if the optimizer
        stepped more often, or on more tokens than the island's batch; RunFailedError if the loss is not finite;
        FencedError if a newer process has this island's place. Nothing of what was offered before is lost.
        """
        if self.over:
            return True
        with self._failing():
            self._refuse_unread()
            self._tokens += self._checked(tokens)
            if self._steps == 0 and not skipped:
                return False
            stepped = Stepped(self._tokens, None if loss is None else self._finite(loss))
            self._tokens = self._steps = 0
            self._go_on(stepped)
        return self.over

    def sampler(self, data: Any, *, tokens_each: int) -> ShardSampler:
        """Indices into a map-style dataset: the island's part of it from its position on, shuffled anew each epoch,
        without end. Give it to a DataLoader, and count every sample as `tokens_each` tokens."""
        seed = self._exchange.run.settings.train.seed
        return ShardSampler(self, data if isinstance(data, int) else len(data), tokens_each, seed)

    def resume(self, loader: StatefulLoader) -> None:
        """With stateful data, before the first step: bring `loader` into the state that was saved last, and save its
        state from now on, with the optimizer's. What was offered since then, `skips` tells."""
        training = self._exchange.training
        with self._failing():
            if self.data != "stateful":
                raise UsageError(
                    f"island {self.name} has {self.data} data in this run: its loader's state is not saved",
                    where="island.resume",
                    hint="in the inventory of a new run: infra: loop/stateful",
                )
            saved, training.loader = training.saved_loader, loader
            self._behind = self.position
            if saved is not None and saved.position <= self.position:
                loader.load_state_dict(saved.state)
                self._behind -= saved.position

    def skips(self, *, tokens: int) -> bool:
        """Whether the loader's next batch is not to be trained on, because an earlier process of this island has
        offered it after the state was saved."""
        behind, self._behind = self._behind, max(0, self._behind - tokens)
        return behind > 0

    def finish(self, drain_s: float = DRAIN_S) -> None:
        """Leave. Before the run's end: offer what no offer holds yet, and wait at most `drain_s` until it is merged."""
        if not self.over:
            with self._failing():
                self._exchange.leave(drain_s)
            self._close()

    def __enter__(self) -> LoopIsland:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Leave at once, as `error` ended the loop: its last heartbeat says so. A `with` statement does this itself."""
        if not self.over:
            self._exchange.fail(error)
            self._close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _go_on(self, stepped: Stepped | None) -> None:
        before = self.position
        wanted = self._exchange.go_on(stepped)
        if wanted is None:
            self._close()
            return
        self.position, self.progress, self.moments_lost = wanted.position, wanted.at.fraction, wanted.at.moments_lost
        if stepped is not None and self.data != "external" and self.position != before + stepped.tokens:
            raise self._moved(before + stepped.tokens)

    def _moved(self, position: int) -> DilocoError:
        """The log holds data of this island that is not this process's, beyond its own `position`."""
        learner = self._exchange.learner
        mine = learner.joined.incarnation
        if learner.state.learner(self.name).floor > mine:
            return FencedError(f"a newer process has taken the place of incarnation {mine} of {self.name}")
        return TryAgainError(
            f"an earlier process of {self.name} has offered data up to token {self.position:,} of its shard after "
            f"this one began, which stands at {position:,}",
            hint="start this loop again: it goes on after that",
        )

    def _refuse_unread(self) -> None:
        if self.data != "stateful":
            return
        if self._exchange.training.loader is None:
            raise UsageError(
                f"island {self.name} has stateful data, and no loader was resumed",
                where="island.step",
                hint="call island.resume(loader) before the first step",
            )
        if self._behind > 0:
            raise UsageError(
                f"a step on data that {self.name} has offered before: {self._behind:,} tokens of it are left to skip",
                where="island.step",
                hint="for batch in loader: if island.skips(tokens=...): continue",
            )

    def _checked(self, tokens: int) -> int:
        if not isinstance(tokens, int) or tokens < 0:
            raise UsageError(f"tokens must be a whole number, 0 or more, not {tokens!r}", where="island.step")
        if self._steps > 1:
            raise UsageError(
                f"{self._steps} optimizer steps since the last call of island.step: none may be left out",
                where="island.step",
                hint="call island.step(tokens=..., loss=...) right after each optimizer.step()",
            )
        if self._tokens + tokens > self._most:
            missing = " without an optimizer step" if self._steps == 0 else ""
            raise UsageError(
                f"{self._tokens + tokens:,} tokens since the last step{missing}, and {self.name} may take "
                f"{self._most:,} at most, its batch in the run",
                where="island.step",
                hint="raise its batch_tokens in the run file or in join(...), or make the loop's batch smaller",
            )
        return tokens

    def _finite(self, loss: float | torch.Tensor) -> float:
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if not isfinite(value):
            raise RunFailedError(
                f"the loss is {value} at token {self.position} of shard {self.shard}",
                hint="lower the learning rate; a restart begins at the newest committed parameters",
            )
        return value

    def _count(self, *called: Any) -> None:
        self._steps += 1

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error ends the island's part in the run; its hint is shown under Python's traceback."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, DilocoError) and error.hint:
                error.add_note(f"hint: {error.hint}")
            self.fail(error)
            raise

    def _close(self) -> None:
        self.over = True
        self._hook.remove()
        self._exchange.close()
