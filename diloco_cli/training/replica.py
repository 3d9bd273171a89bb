"""One model replica: its inner step, its micro-batches, batches built ahead; and the training port of an island with
one device (protocol/actors/learner.py, `Training`), a replica in this process. And what a model has beside its trained
parameters: which buffers training changes, and what no exchange carries.

`Prefetched` builds the next batch, most likely (position + n, n), while the current step runs, if building takes long
enough to be worth a thread (`pays`). Timing decides which batches are built ahead, never what is in them. For a CUDA
device they lie in pinned memory. Each rank of an island builds the whole batch and computes its rows of it: a source
knows no ranks.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import distributed, nn

from diloco_cli.clock import monotonic_s
from diloco_cli.config.models import MODEL_PRESETS, facts_from_parameters
from diloco_cli.config.settings import RunSettings
from diloco_cli.errors import DilocoError, InfeasibleError, RunFailedError, TryAgainError, UsageError
from diloco_cli.layout import Layout, ParameterFact, buffer_names, shapes_of
from diloco_cli.plan.memory import Fit, computing, fit_with_micro_batch, model_facts
from diloco_cli.protocol.actors.learner import Moments, Progression, Stepped
from diloco_cli.protocol.log.operations import Now, Sleep, Steps
from diloco_cli.protocol.log.records import RunFormat
from diloco_cli.tasks.build import Batch, Data, build_data, build_model_on_meta, losses_of
from diloco_cli.tasks.models import divides, prepare
from diloco_cli.tasks.weights import check_frozen
from diloco_cli.tensors.flat import (
    bare_model,
    bare_name,
    bare_parameters,
    bare_tensors,
    buffer_facts,
    flatten,
    layout_like,
    parameter_facts,
    persistent_buffers,
    unflatten,
)
from diloco_cli.training.inner import (
    autocast,
    build_optimizer,
    clip_gradients,
    finite_norm,
    keeps_moments,
    make_step,
    restore_inner_state,
    runs_in_bf16,
    saved_moments,
    set_learning_rate,
    step_learning_rate,
)

CPU = torch.device("cpu")
GB = 1e9
LEAST_S = 0.001  # a thread costs 0.2 to 0.5 ms of CPU on two busy cores
WORTH_ON_CPU, WORTH_BESIDE_ACCELERATOR = 0.2, 0.02  # of a step
WATCHED = 3  # batches during which it is checked whether the source draws from the process's random generators
Request = tuple[int, int, int, int]  # shard, num_shards, position, batch_tokens
Rule = Callable[[float, float, torch.device], bool]
State = Mapping[str, Any]  # of a model beside its trained parameters
MARKS = 251  # bfloat16 holds as many integers


@dataclass
class Replica:
    """A model with its inner optimizer, reading shard `shard` of `num_shards` of the data.

    `micro_batch_tokens`: tokens of one forward and backward pass; None: as the settings say, with auto the whole batch.
    `gradient_norm` is that of the last step, before clipping; `passed`: the share of the batch that was computed.
    `data_s`: how long its steps have waited for their batches, all together; not the first, which opens the data.
    `before_update` is called before the optimizer changes anything.
    """

    settings: RunSettings
    model: nn.Module
    data: Data
    shard: int
    num_shards: int
    device: torch.device = CPU
    ranks = 1  # that divide a batch
    gradient_norm: float = field(default=0.0, init=False)
    passed: float = field(default=0.0, init=False)
    data_s: float | None = field(default=None, init=False)
    micro_batch_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is None and self.settings.train.micro_batch_tokens != "auto":
            self.micro_batch_tokens = self.settings.train.micro_batch_tokens
        prepare(self.model, self.settings.train)
        self.optimizer = build_optimizer(self.model, self.settings.train.inner)
        self.before_update: Callable[[], None] = lambda: None
        self.carried: Collection[str] = ()  # the buffers that may change
        self._buffers: State | None = buffers_of(self.model)  # until the first step
        self.model.train()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return bare_tensors(self.model)

    @property
    def called(self) -> str:
        """In errors."""
        return str(self.device)

    def step(self, position: int, batch_tokens: int, lr: float) -> float:
        """One inner step on the batch at `position` (tokens into the shard); returns the loss in nats per token.

        If the loss is not finite it is returned and no parameter is changed: the caller reports it. Raises
        RunFailedError if the gradients are not finite.
        """
        self.optimizer.zero_grad(set_to_none=True)
        mean = self._accumulate(position, batch_tokens)
        norm = clip_gradients(self.model, self.settings.train.inner.clip_norm)
        both = torch.stack([mean.reshape(()), norm.to(mean.device)])
        loss, norm_here = both.tolist()  # the step's only wait for the device
        if isfinite(loss):
            self._optimize(norm_here, lr)
        return float(loss)

    def backward(self, position: int, batch_tokens: int) -> float:
        """Forward and backward on one batch; gradients are added to what is there. Returns the mean loss."""
        return float(self._accumulate(position, batch_tokens))

    def apply(self, lr: float) -> None:
        """Clip the gradients and let the optimizer step. Raises RunFailedError before it if they are not finite."""
        self._optimize(float(clip_gradients(self.model, self.settings.train.inner.clip_norm)), lr)

    def _optimize(self, norm: float, lr: float) -> None:
        """`norm`: of the gradients, before they were clipped. Raises UsageError if the first pass changed buffers."""
        if self._buffers is not None:
            refuse_changed(self._buffers, buffers_of(self.model), self.carried)
            self._buffers = None
        self.gradient_norm = finite_norm(norm)
        set_learning_rate(self.optimizer, lr)
        self.before_update()
        make_step(self.optimizer)

    def _accumulate(self, position: int, batch_tokens: int) -> torch.Tensor:
        """Forward and backward on one micro-batch after the other; the mean loss, a scalar still on the device.

        Each micro-batch counts with its share of the targets, so that the mean loss over the whole batch is what is
        differentiated and returned. An auxiliary term of the model is weighted likewise; it is trained on but is no
        part of the loss that is returned. A batch of one micro-batch is computed as it is.
        """
        asked_s = monotonic_s()
        batch = self.data.batch(self.shard, self.num_shards, position, batch_tokens)
        self.data_s = 0.0 if self.data_s is None else self.data_s + monotonic_s() - asked_s
        self.passed, losses = 0.0, []
        parts = list(self._parts(batch, batch_tokens))
        for index, (part, share) in enumerate(parts):
            with self._adding_up(last=index == len(parts) - 1):
                losses.append(self._pass(part, share))
            self.passed = (index + 1) / len(parts)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _parts(self, batch: Batch, batch_tokens: int) -> Iterator[tuple[Batch, float]]:
        """Micro-batches, each with its share of the whole batch's targets."""
        return micro_batches(batch, batch_tokens, self.micro_batch_tokens)

    def _adding_up(self, last: bool) -> AbstractContextManager[object]:
        """Around the passes on a micro-batch."""
        return nullcontext()

    def _pass(self, part: Batch, share: float) -> torch.Tensor:
        """Forward and backward on one micro-batch; its share of the loss, still on the device. Ranks take the mean of
        their gradients: times their number it is the sum."""
        at_once = self.device.type == "cuda"  # from pinned memory, without waiting
        inputs, targets = (tensor.to(self.device, non_blocking=at_once) for tensor in part)
        with autocast(self.settings.train.precision, self.device):
            loss, objective = losses_of(self.model(inputs, targets))
        scale = share * self.ranks
        (objective if scale == 1.0 else scale * objective).backward()  # type: ignore[no-untyped-call]
        return loss.detach() if share == 1.0 else share * loss.detach()


def check_layout(run: RunFormat, model: nn.Module) -> None:
    """Raises UsageError if this learner's model has another parameter list than the run, or other frozen values."""
    facts = parameter_facts(model)
    if not _has_tensors_of(run, model, facts):
        raise UsageError(
            f"the model built here is not the run's: {_first_difference(run, model, facts)}",
            where="FORMAT.json",
            hint="use the same version of the model's code on every island",
        )
    check_frozen(run.settings, model)


def _first_difference(run: RunFormat, model: nn.Module, facts: list[ParameterFact]) -> str:
    """The first tensor that differs, in the model's order, with its shape in the run and here."""
    wanted = {name: str(list(shape)) for name, shape in shapes_of(run.layout).items()}
    buffers = buffer_facts(model, buffer_names(run.layout))
    built = {fact.name: str(list(fact.shape)) for fact in (*facts, *buffers)}
    other = [name for name in {**built, **wanted} if wanted.get(name) != built.get(name)]
    if not other:
        return "its tensors have the same names and shapes, but other types or another order"
    first, more = other[0], f"; {len(other) - 1} more differ" if len(other) > 1 else ""
    return f"{first} is {wanted.get(first, 'missing')} in the run and {built.get(first, 'missing')} here{more}"


def _has_tensors_of(run: RunFormat, model: nn.Module, facts: list[ParameterFact]) -> bool:
    """By the digest of the layout that these give; where nothing in the run builds the model, by names and shapes
    alone, for its layout was made of these."""
    if run.settings.model.is_built:
        return layout_like(run.layout, model, run.settings.sync).digest == run.layout.digest
    return {fact.name: fact.shape for fact in facts} == shapes_of(run.layout)


class DeviceTraining:
    """`slowdown`: to emulate a slower island, it sleeps until a step has taken `slowdown` times its own time."""

    def __init__(self, run: RunFormat, replica: Replica, slowdown: float = 1.0) -> None:
        self.run, self.replica, self.slowdown = run, replica, slowdown
        replica.carried = buffer_names(run.layout)

    @property
    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self.replica.tensors

    def step(self, position: int, batch_tokens: int, at: Progression) -> Steps[Stepped]:
        started_s: float = yield Now()
        stepped = self.train(position, batch_tokens, at)
        if self.slowdown > 1.0:
            until_s = started_s + self.slowdown * ((yield Now()) - started_s)
            while (left_s := until_s - (yield Now())) > 0:  # news may end a sleep before its time
                yield Sleep(left_s)
        return stepped

    def train(self, position: int, batch_tokens: int, at: Progression) -> Stepped:
        lr = step_learning_rate(self.run, at.fraction, at.own_steps, at.moments_lost)
        place = f"at token {position} of shard {self.replica.shard}"
        try:
            loss = self._step(position, batch_tokens, lr)
        except RunFailedError as error:
            raise RunFailedError(f"{error.message} {place}", hint=error.hint) from error
        if not isfinite(loss):
            raise RunFailedError(
                f"the loss is {loss} {place}",
                hint="lower train.inner.lr; a restart begins at the newest committed parameters",
            )
        return Stepped(batch_tokens, loss)

    def _step(self, position: int, batch_tokens: int, lr: float) -> float:
        with enough_memory(self.replica.called, self.replica.micro_batch_tokens):
            return self.replica.step(position, batch_tokens, lr)

    def read(self, fragment: int) -> torch.Tensor:
        """The fragment's vector, in float32 on the CPU."""
        return flatten(self.run.layout.fragments[fragment], self._tensors)

    def write(self, fragment: int, values: torch.Tensor) -> None:
        """The fragment's vector, in float32."""
        unflatten(self.run.layout.fragments[fragment], values, self._tensors)

    def save(self) -> Moments | None:
        return saved_moments(self.replica.model, self.replica.optimizer)

    def restore(self, moments: bytes) -> bool:
        return restore_inner_state(self.replica.model, self.replica.optimizer, moments)

    def reset(self) -> bool:
        if not keeps_moments(self.replica.optimizer):
            return False
        self.replica.optimizer.state.clear()
        return True

    def keep_alive(self) -> None:
        """To be called while there is nothing to do."""

    def close(self, status: int) -> None:
        """To be called at the end, however it came; `status`: this process's exit status."""


def micro_batches(batch: Batch, batch_tokens: int, micro_batch_tokens: int | None) -> Iterator[tuple[Batch, float]]:
    """Parts of whole examples, each with its share of the batch's targets; the last may be smaller. One part if that
    is as large as the batch, or None.

    Raises UsageError for a batch that cannot be divided by examples.
    """
    if micro_batch_tokens is None or micro_batch_tokens >= batch_tokens:
        yield batch, 1.0
        return
    inputs, targets = batch
    examples, at_once = examples_at_once(batch, batch_tokens, micro_batch_tokens)
    if at_once >= examples:
        yield batch, 1.0
        return
    for start in range(0, examples, at_once):
        part = inputs[start : start + at_once], targets[start : start + at_once]
        yield part, part[1].numel() / targets.numel()


def examples_at_once(batch: Batch, batch_tokens: int, micro_batch_tokens: int | None) -> tuple[int, int]:
    """How many examples the batch has, and a micro-batch of it. Raises UsageError if it cannot be divided by them."""
    inputs, targets = batch
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        raise UsageError(
            f"data: a batch of {list(inputs.shape)} and {list(targets.shape)} cannot be divided into micro-batches: "
            "the first dimension must count examples, as many of both",
            where="data",
            hint=f"--set train.micro_batch_tokens={batch_tokens} takes whole batches",
        )
    return len(inputs), max(1, len(inputs) * (micro_batch_tokens or batch_tokens) // batch_tokens)


def micro_batch_here(
    settings: RunSettings,
    parameters: Iterable[ParameterFact],
    num_fragments: int,
    batch_tokens: int,
    device: torch.device,
    ranks: int = 1,
) -> tuple[int, Fit]:
    """Tokens of a micro-batch on this `device`, one of `ranks` that are alike, and what it holds: by the plan's rule,
    for a machine that is in no plan. Raises InfeasibleError for a batch of fewer sequences than ranks."""
    if settings.model.preset in MODEL_PRESETS:
        model = model_facts(settings.model)
    else:
        sequence = getattr(build_data(settings), "sequence", None)
        found = sequence if isinstance(sequence, int) else 1
        model = facts_from_parameters(list(parameters), found, ranks == 1 or divides(build_model_on_meta(settings)))
    if ranks > max(1, sequences := batch_tokens // model.sequence):
        raise InfeasibleError(
            f"a batch of {sequences} sequences cannot be divided over {ranks} ranks",
            hint=f"--ranks {max(1, sequences)} at most, or another run with larger batches",
        )
    memory_gb = torch.cuda.get_device_properties(device).total_memory / GB if device.type == "cuda" else None
    half = runs_in_bf16(settings.train.precision, device)
    how = computing(settings, model, half, num_fragments, own_memory=device.type == "cuda")
    fit = fit_with_micro_batch(settings.train, model, batch_tokens, how, ranks, memory_gb)
    return min(fit.sequences * model.sequence, batch_tokens), fit


def parameters_of(layout: Layout) -> list[ParameterFact]:
    """The tensors of a run's model, from its layout, without building the model; each once, also if split by rows."""
    facts = {
        slot.name: ParameterFact(slot.name, slot.shape, fragment.embedding, slot.dtype)
        for fragment in layout.fragments
        for slot in fragment.tensors
    }
    return list(facts.values())


def pays(build_s: float, step_s: float, device: torch.device) -> bool:
    """Whether a batch that takes `build_s` should be built ahead, during a step of `step_s` on `device`.

    Beside an accelerator, CPU cores are idle. If training uses the cores, building a computed batch ahead gains
    nothing, and a batch of 10 % of a step made steps 2 to 7 % slower; with batches that wait (for a disk) for half a
    step, training was 1.1 to 1.4 times as fast. Presets' batches take up to 1 % of it.
    """
    worth = WORTH_ON_CPU if device.type == "cpu" else WORTH_BESIDE_ACCELERATOR
    return build_s > max(LEAST_S, worth * step_s)


class Prefetched:
    """`data`, with the probable next batch built ahead. Errors are raised when the batch is asked for, as without it.

    A source that draws from one of the process's own random generators is never asked ahead: the model may draw from
    it too (dropout), and the order of draws must not depend on timing. For one calling thread only."""

    def __init__(
        self, data: Data, device: torch.device, clock_s: Callable[[], float] = monotonic_s, pays: Rule = pays
    ) -> None:
        self._device = device
        self.data: Data = Pinned(data) if device.type == "cuda" and torch.cuda.is_available() else data
        self._clock_s, self._pays = clock_s, pays
        self._ahead: _Build | None = None
        self._may_build_ahead, self._watched = True, WATCHED
        self._build_s = 0.0
        self._left_s: float | None = None

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        step_s = None if self._left_s is None else self._clock_s() - self._left_s
        batch = self._batch((shard, num_shards, position, batch_tokens))
        if self._may_build_ahead and step_s is not None and self._pays(self._build_s, step_s, self._device):
            self._ahead = _Build(self.data, (shard, num_shards, position + batch_tokens, batch_tokens), self._clock_s)
        self._left_s = self._clock_s()
        return batch

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        return self.data.held_out(num_sequences)

    def _batch(self, request: Request) -> Batch:
        """The requested batch, built ahead if possible. Two are never built at once: data need not be thread-safe."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.join()
            self._build_s = ahead.took_s
            if ahead.request == request:
                return ahead.outcome.result()
        before, started_s = _random_states() if self._watched else {}, self._clock_s()
        batch = self.data.batch(*request)
        self._build_s = self._clock_s() - started_s
        if self._watched:
            self._watched -= 1
            after = _random_states()
            self._may_build_ahead &= all(after[name] == state for name, state in before.items())
        return batch


class Pinned:
    """`data`, whose batches lie in pinned memory; torch uses that again."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def batch(self, shard: int, num_shards: int, position: int, batch_tokens: int) -> Batch:
        inputs, targets = self.data.batch(shard, num_shards, position, batch_tokens)
        return _pinned(inputs), _pinned(targets)

    def held_out(self, num_sequences: int) -> Iterator[Batch]:
        return self.data.held_out(num_sequences)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


class _Build(threading.Thread):
    """The thread that builds one batch."""

    def __init__(self, data: Data, request: Request, clock_s: Callable[[], float]) -> None:
        super().__init__(name="prefetch", daemon=True)
        self.request, self.took_s = request, 0.0
        self._data, self._clock_s = data, clock_s
        self.outcome: Future[Batch] = Future()
        self.start()

    def run(self) -> None:
        started_s = self._clock_s()
        try:
            self.outcome.set_result(self._data.batch(*self.request))
        except BaseException as error:  # raised where the batch is asked for
            self.outcome.set_exception(error)
        self.took_s = self._clock_s() - started_s


def _random_states() -> dict[str, object]:
    """The states of the process-wide random generators whose modules are loaded."""
    states: dict[str, object] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, keys.tobytes(), *rest)
    return states


class OutOfMemoryError(DilocoError):
    """The device has too little memory for what this process does."""

    code = "out_of_memory"


class OtherRankLostError(TryAgainError):
    """Nothing is wrong with this rank: the one that is lost says what ended it."""

    code = "rank_lost"


@contextmanager
def enough_memory(called: str, micro_batch_tokens: int | None = None) -> Iterator[None]:
    """`micro_batch_tokens`: what this process computes at once."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = "a small train.micro_batch_tokens"
        if micro_batch_tokens is not None:
            smaller = f"train.micro_batch_tokens below {micro_batch_tokens}"
        raise OutOfMemoryError(
            f"{called} is out of memory: {str(error).partition('. ')[0]}",
            hint=f"more ranks (--ranks), or a run with {smaller} or train.checkpointing=true",
        ) from error


@contextmanager
def with_others(doing: str) -> Iterator[None]:
    """Around what all ranks do together."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise OtherRankLostError(f"another rank of the island was lost during {doing}") from error
        raise


def state_of(model: nn.Module) -> State:
    """A copy of what a checkpoint of the model holds beside its trained parameters: persistent buffers, frozen
    parameters, extra state."""
    found = bare_model(model).state_dict(keep_vars=True)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    return {
        bare_name(name): _as_bytes(value) if isinstance(value, torch.Tensor) else repr(value)
        for name, value in found.items()
        if id(value) not in trained
    }


def changed_in(before: State, after: State) -> list[str]:
    return [name for name in {**before, **after} if not _same(before.get(name), after.get(name))]


def refuse_changed(before: State, after: State, may_change: Collection[str] = ()) -> None:
    """Changed state would be lost without a word unless the run carries it (`may_change`)."""
    changed = [name for name in changed_in(before, after) if name not in may_change]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise UsageError(
            f"training changes {changed[0]}{more}, which is not exchanged: it would differ from island to island and be"
            " lost in the export",
            where="model",
            hint="a new run carries persistent buffers that the first two steps change, where launch has the model and"
            " its data to try them; register what is only a cache with persistent=False",
        )


def buffers_of(model: nn.Module) -> State:
    """The same of persistent buffers alone, as frozen parameters may be large."""
    return {name: _as_bytes(value) for name, value in persistent_buffers(model).items()}


@torch.no_grad()
def refuse_shared_memory(model: nn.Module) -> None:
    """Parameters that are views of the same memory would be written to one after the other: each is marked, and gets
    its values back."""
    trained = [(name, p) for name, p in bare_parameters(model).items() if p.requires_grad and p.numel()]
    places = Counter(p.untyped_storage().data_ptr() for _, p in trained)
    near = [(name, p, p.clone()) for name, p in trained if places[p.untyped_storage().data_ptr()] > 1]
    for index, (_, parameter, _) in enumerate(near):
        parameter.fill_(index % MARKS)
    found = [name for index, (name, p, _) in enumerate(near) if not bool((p == index % MARKS).all())]
    for _, parameter, values in near:
        parameter.copy_(values)
    if found:
        raise UsageError(
            f"{found[0]} shares memory with another parameter, and is not the same one",
            where="model",
            hint="tie them: give both modules the same torch.nn.Parameter",
        )


def carried_text(model: nn.Module, carried: Collection[str]) -> str:
    """`carried: 12,345 parameters in 8 tensors (1 tied), 2 buffers (such as norm.running_mean); ...`."""
    every = list(model.named_parameters(remove_duplicate=False))
    unique = bare_parameters(model).values()
    trained = [p for p in unique if p.requires_grad]
    frozen, buffers = len(unique) - len(trained), len(list(model.buffers())) - len(carried)
    tied = len(every) - len(unique)
    text = f"carried: {sum(p.numel() for p in trained):,} parameters in {len(trained)} tensors"
    text += f" ({tied} tied)" if tied else ""
    text += f", {len(carried)} buffers (such as {min(carried)})" if carried else ""
    return f"{text}; as the model's code makes them, not exchanged: {frozen} frozen tensors, {buffers} buffers"


def _as_bytes(value: torch.Tensor) -> torch.Tensor | str:
    """A copy: of any type, with NaN equal to itself."""
    if value.is_quantized or value.layout != torch.strided:
        return repr(value)
    return value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return torch.equal(a, b) if both else type(a) is type(b) and a == b
