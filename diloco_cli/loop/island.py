"""`join`: a user's own loop becomes an island of a run, and the object that the loop calls after each optimizer step.

The learner's actor runs beside the loop: on its thread between two steps, and on lanes beside it. It stops where it
wants a step, and goes on when the user's loop has made it:

    until_wanted(train, None)      ... hear, offer, adopt ...  -> Wanted: the user's loop trains
    until_wanted(train, Stepped)   ... hear, offer, adopt ...  -> Wanted, or None: the run is over
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from types import TracebackType
from typing import Any

import torch
from torch import nn

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.config.hardware import DataClass, data_class, data_class_of, infra_of
from diloco_cli.errors import (
    DilocoError,
    FencedError,
    NotFoundError,
    RunFailedError,
    TerminatedError,
    TryAgainError,
    UsageError,
)
from diloco_cli.events.cause import cause_of
from diloco_cli.layout import buffer_names
from diloco_cli.learner.daemon import (
    CLEAN_STOP_S,
    Facts,
    behind_its_link,
    depart,
    heartbeat_unless_it_fails,
    refuse_another_regions_bucket,
    region_here,
    traffic,
)
from diloco_cli.loop.data import SavedLoader, ShardSampler, StatefulLoader, encoded, joined, parted
from diloco_cli.loop.states import keeps_nothing, restore_state, saved_state
from diloco_cli.protocol.actors.learner import Learner, Moments, Progression, Stepped
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.keys import FORMAT_KEY, number_of
from diloco_cli.protocol.log.operations import Operation, Steps
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.protocol.log.state import LearnerState, RunPhase
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import check_operator, signing_secret
from diloco_cli.runtime.daemon import Lanes, StopSignal, SystemClock, own_claim, perform
from diloco_cli.signing import learner_signer
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError
from diloco_cli.store.retry import background_store
from diloco_cli.store.url import parse_url
from diloco_cli.store.wrappers import MeteredStore
from diloco_cli.tasks.weights import check_frozen, unchecked_frozen
from diloco_cli.tensors.flat import bare_tensors, flatten, unflatten
from diloco_cli.training.replica import (
    State,
    buffers_of,
    carried_text,
    check_layout,
    refuse_changed,
    refuse_shared_memory,
)
from diloco_cli.training.wire import TensorWire

LOG = logging.getLogger("diloco")
TELLS_AFTER_S = 10.0  # of waiting in one call, and again after as long
DRAIN_S = 30.0


class LoopExchange:
    """One incarnation of one island's learner. `go_on` and `leave` are called by the thread of the user's loop."""

    def __init__(self, run: RunFormat, island: Island, bare: Store, training: LentTraining) -> None:
        self.run, self.island, self.training = run, island, training
        self._stop = stop = StopSignal()
        meter = MeteredStore(behind_its_link(bare, island))
        self._store, news = background_store(meter, stop.wait, stop.is_due, self._warn)
        self._store.mark = (FORMAT_KEY, run.kept[FORMAT_KEY])
        facts = Facts(island.name, self._tell, bare.url)
        clock = SystemClock(monotonic_s, stop.wait, lambda: stop.check(CLEAN_STOP_S))
        self._lanes = lanes = Lanes(self._store, clock, meter)
        lanes.hurries = lambda: learner.is_leaving
        learner: Learner
        self.learner = learner = Learner(
            run,
            island.name,
            own_claim(island.ranks),
            training,
            TensorWire(run),
            nonce,
            lanes.start,
            facts,
            stop.is_set,
            lambda: not stop.is_due(),
            lambda: _said(facts) | traffic(meter, self._store, learner),
            lanes.news.set,
        )
        news.heartbeat = lambda: heartbeat_unless_it_fails(meter, learner)
        self._waits_since_s = 0.0
        self._clock = SystemClock(monotonic_s, self._sleep_s, lanes.check)
        self._train = learner.train()

    def go_on(self, stepped: Stepped | None) -> Wanted | None:
        """From one step of the loop to the next that is wanted; None: the run is over. Waits where a learner would."""
        self._waits_since_s = monotonic_s()
        return perform(until_wanted(self._train, stepped), self._store, self._clock)

    def begin_at(self, position: int) -> None:
        """Before the first step."""
        self.training.position = position
        self.learner.progress.begin_at(position)

    def _sleep_s(self, seconds: float) -> None:
        """Sleep, and tell the user's log now and then why a call of his loop waits."""
        self._lanes.sleep_s(seconds)
        now_s = monotonic_s()
        if now_s - self._waits_since_s >= TELLS_AFTER_S:
            LOG.warning("%s waits: %s", self.island.name, self._why())
            self._waits_since_s = now_s

    def _why(self) -> str:
        if self.learner.state.phase is RunPhase.STOPPED:
            return f"the run is STOPPED; go on with: diloco resume {self._store.url}"
        return self.learner.note or "for the log"

    def leave(self, drain_s: float) -> None:
        """Leave before the run's end, in order."""
        self._stop.patience_s = drain_s
        self._stop.ask()
        self._train.close()  # at the step that is wanted: there will be none
        perform(self.learner.drain(), self._store, self._clock)
        self.learner.go(LearnerState.DONE)
        self.learner.note = "its loop has ended"

    def fail(self, error: BaseException) -> None:
        """The last heartbeat will state what ended the loop. One that its user stops has not failed."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            error = TerminatedError("stopped by its user")
        self.learner.ended_by(error, cause_of(error).text)

    def close(self) -> None:
        """End the threads, and write the last heartbeat."""
        depart(self.learner, self._lanes, self._store)
        self._stop.ask()  # what is still being repeated to a store that fails

    def _tell(self, text: str) -> None:
        LOG.info("%s: %s", self.island.name, text)

    def _warn(self, line: str) -> None:
        LOG.warning("%s: %s", self.island.name, line)


def _said(facts: Facts) -> dict[str, Any]:
    """For the heartbeat. Only the loop knows how far it is in its first batch."""
    found = facts.heartbeat(0.0)
    return found if facts.tokens else found | {"note": "before its first step"}


@dataclass(frozen=True)
class Wanted:
    """The step that the actor waits for: at `position`, in tokens into the island's shard, `at` that place of the
    run."""

    position: int
    at: Progression


def until_wanted(train: Generator[Any, Any, Any], stepped: Stepped | None) -> Steps[Wanted | None]:
    """Go on with `Learner.train` until it wants its next step; None once it has ended."""
    answer: Any = stepped
    while True:
        try:
            operation: Operation | Wanted = train.send(answer)
        except StopIteration:
            return None
        if isinstance(operation, Wanted):
            return operation
        answer = yield operation


class LentTraining:
    """The training port over a model and an optimizer that belong to the user's loop. Only between two steps of it does
    the actor read and write them.

    `loader`: one whose state is saved with the optimizer's, `saved_loader`: the state that was restored last.
    `keeps_loader`: there will be such a loader. `position`: of the next step."""

    def __init__(
        self, run: RunFormat, model: nn.Module, optimizer: torch.optim.Optimizer, keeps_loader: bool = False
    ) -> None:
        self._layout, self._model, self._optimizer = run.layout, model, optimizer
        self.keeps_loader = keeps_loader
        self.loader: StatefulLoader | None = None
        self.saved_loader: SavedLoader | None = None
        self._steps, self.position, self._told = 0, 0, False
        self._buffers: State | None = buffers_of(model)  # until the first step

    def step(self, position: int, batch_tokens: int, at: Progression) -> Generator[Any, Any, Stepped]:
        """Raises UsageError if the loop's first step has changed buffers that the run does not carry."""
        self.position = position
        stepped: Stepped = yield Wanted(position, at)
        if self._buffers is not None:
            refuse_changed(self._buffers, buffers_of(self._model), buffer_names(self._layout))
            self._buffers = None
        self._steps, self.position = self._steps + 1, self.position + stepped.tokens
        return stepped

    def read(self, fragment: int) -> torch.Tensor:
        """The fragment's vector, in float32 on the CPU."""
        return flatten(self._layout.fragments[fragment], bare_tensors(self._model))

    def write(self, fragment: int, values: torch.Tensor) -> None:
        """The fragment's vector, in float32."""
        unflatten(self._layout.fragments[fragment], values, bare_tensors(self._model))

    def save(self) -> Moments | None:
        """Raises UsageError if the loader's state cannot be saved."""
        own = saved_state(self._model, self._optimizer)
        if own is None and not self._told and self._steps and not keeps_nothing(self._optimizer):
            self._told = True
            kind = type(self._optimizer).__name__
            LOG.warning("the state of %s is not saved: it is more than tensors and numbers by parameter", kind)
        if self.loader is not None:
            own = joined(own or b"", encoded(self.loader, self.position))
        return None if own is None else Moments(self._steps, lambda: own)

    def restore(self, moments: bytes) -> bool:
        own = moments
        if self.keeps_loader:
            own, self.saved_loader = parted(moments)
        return keeps_nothing(self._optimizer) or restore_state(self._model, self._optimizer, own)

    def reset(self) -> bool:
        if keeps_nothing(self._optimizer):
            return self.keeps_loader
        self._optimizer.state.clear()
        return True


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
        self._tokens = self._steps = self._behind = self._within = 0
        self._hooks = (
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._count),
        )
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
        self._within = 0  # of an optimizer's step that has raised
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
            if saved is not None:
                loader.load_state_dict(saved.state)
                self._behind -= saved.position
                if self._behind < 0:  # it has read what no offer held
                    self._exchange.begin_at(saved.position)
                    self.position, self._behind = saved.position, 0

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
            return FencedError(f"a newer process has taken the place of incarnation {number_of(mine)} of {self.name}")
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
        self._refuse_uncalled()
        if self._tokens + tokens > self._most:
            missing = " without an optimizer step" if self._steps == 0 else ""
            raise UsageError(
                f"{self._tokens + tokens:,} tokens since the last step{missing}, and {self.name} may take "
                f"{self._most:,} at most, its batch in the run",
                where="island.step",
                hint="raise its batch_tokens in the run file or in join(...), or make the loop's batch smaller",
            )
        return tokens

    def _refuse_uncalled(self) -> None:
        if self._steps > 1:
            raise UsageError(
                f"{self._steps} optimizer steps since the last call of island.step: none may be left out",
                where="island.step",
                hint="call island.step(tokens=..., loss=...) right after each optimizer.step()",
            )

    def _finite(self, loss: float | torch.Tensor) -> float:
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if not isfinite(value):
            raise RunFailedError(
                f"the loss is {value} at token {self.position} of shard {self.shard}",
                hint="lower the learning rate; a restart begins at the newest committed parameters",
            )
        return value

    def _begin_step(self, *called: Any) -> None:
        """A loop that never calls `step` is told here: nothing of what it learns would count."""
        with self._failing():
            self._refuse_uncalled()
        self._within += 1

    def _count(self, *called: Any) -> None:
        """A step that calls its base class's own, where torch calls the hooks for both, counts once."""
        self._within = max(0, self._within - 1)
        self._steps += self._within == 0

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
        for hook in self._hooks:
            hook.remove()
        self._exchange.close()


def join(
    run: str,
    *,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: DataClass | None = None,
    batch_tokens: int | None = None,
) -> LoopIsland:
    """Join the run at the URL `run` as the island `name`, and give `model` the newest committed parameters, and
    `optimizer` its saved moments. Call it before the data loader is built: it says where the data begins.

    An island that the run does not know asks to be admitted, with `data` ("external" if nothing is said) and
    `batch_tokens` (the run's) as it describes itself; of a known one, both are as the run says. Raises UsageError if
    the model is another one than the run's, or the island is trained by `diloco learner`; NotFoundError if there is no
    such run; StoreError if its bucket cannot be opened.
    """
    with _hinted():
        _refuse_several_ranks()
        _refuse_foreign(model, optimizer)
        bare, given = _bucket_of(run), None if data is None else data_class(data, "join(data=...)")
        store, _ = background_store(bare, sleep_s, lambda: False, LOG.warning)
        clock = SystemClock(monotonic_s, sleep_s, lambda: None)
        secret = signing_secret()
        format_ = perform(read_format(bare.url, secret, (learner_signer(name),)), store, clock)
        check_operator(format_, bare.url, secret, LOG.warning)
        check_layout(format_, model)
        check_frozen(format_.settings, model)
        if (unchecked := unchecked_frozen(format_.settings, model)) is not None:
            LOG.warning("%s: %s", name, unchecked)
        refuse_shared_memory(model)
        LOG.info("%s: %s", name, carried_text(model, buffer_names(format_.layout)))
        known = _with_island(format_, store, clock, _newcomer(format_, run, name, model, given, batch_tokens))
        island = known.island(name)
        assert island is not None
        declared = _declared(known, island, given)
        refuse_another_regions_bucket(known, island, run)
        training = LentTraining(known, model, optimizer, keeps_loader=declared == "stateful")
        return LoopIsland(LoopExchange(known, island, bare, training), optimizer, declared)


def _bucket_of(run: str) -> Store:
    try:
        return open_store(run)
    except StoreGoneError as error:
        raise NotFoundError(
            f"no run at {run}: {error}",
            where="join(run)",
            hint="a run's URL is what diloco launch prints, and diloco runs",
        ) from error


def _newcomer(
    run: RunFormat, url: str, name: str, model: nn.Module, data: DataClass | None, batch_tokens: int | None
) -> Island:
    """The island as it describes itself, if the run should not know it."""
    return Island(
        name=name,
        region=region_here(run, str(parse_url(url))),
        batch_tokens=batch_tokens or run.settings.train.batch_tokens,
        local_steps=run.settings.sync.every,
        tokens_per_s=0.0,
        step_s=0.0,
        accelerator=next(model.parameters()).device.type,
        infra=infra_of(data or "external"),
    )


def _with_island(run: RunFormat, store: Store, clock: SystemClock, island: Island) -> RunFormat:
    if run.island(island.name) is not None:
        return run
    known = perform(read_log(run), store, clock).with_members(run)
    if known.island(island.name) is not None:
        return known
    LOG.info("%s asks to join run %s", island.name, run.name)
    refuse_another_regions_bucket(run, island, store.url)
    return perform(enter(run, island, nonce(), utc_now_text()), store, clock)


def _declared(run: RunFormat, island: Island, given: DataClass | None) -> DataClass:
    """The island's class of data in the run. Raises UsageError if it is no own loop's, or the loop says otherwise."""
    declared = data_class_of(island.infra)
    if declared is None:
        raise UsageError(
            f"island {island.name} of run {run.name} is trained by diloco learner (infra: {island.infra})",
            hint="in the inventory of a new run: infra: loop/addressed, or join under another name",
        )
    if given is not None and given != declared:
        raise UsageError(
            f"island {island.name} has data={declared!r} in run {run.name}, not {given!r}", where="join(data=...)"
        )
    return declared


def _refuse_several_ranks() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = torch.distributed.get_world_size()
        if ranks > 1:
            raise UsageError(
                f"this is one of {ranks} processes that train together; a loop that joins a run is one process",
                hint="train such an island with: diloco learner --ranks N",
            )


def _refuse_foreign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        raise UsageError(
            f"the optimizer does not hold {len(left)} of the model's parameters, among them {left[0]}",
            where="join(optimizer=...)",
            hint="build the optimizer from this model, after it was moved to its device",
        )


@contextmanager
def _hinted() -> Iterator[None]:
    """The hint of an error stands under Python's traceback."""
    try:
        yield
    except DilocoError as error:
        if error.hint and f"hint: {error.hint}" not in getattr(error, "__notes__", ()):
            error.add_note(f"hint: {error.hint}")
        raise
