"""`join`: a user's own loop becomes an island of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.config.hardware import DataClass, data_class, data_class_of, infra_of
from diloco_cli.errors import DilocoError, NotFoundError, UsageError
from diloco_cli.learner.daemon import refuse_another_regions_bucket, region_here
from diloco_cli.loop.exchange import LOG, LoopExchange
from diloco_cli.loop.handover import LentTraining, keeps_nothing, saves_moments
from diloco_cli.loop.island import LoopIsland
from diloco_cli.protocol.actors.membership import enter
from diloco_cli.protocol.log.commit_log import read_format, read_log
from diloco_cli.protocol.log.records import Island, RunFormat
from diloco_cli.randomness import nonce
from diloco_cli.runtime.consent import check_operator, signing_secret
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.signing import learner_signer
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError
from diloco_cli.store.retry import background_store
from diloco_cli.store.url import parse_url
from diloco_cli.tasks.weights import check_frozen, unchecked_frozen
from diloco_cli.training.replica import check_layout


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
        known = _with_island(format_, store, clock, _newcomer(format_, run, name, model, given, batch_tokens))
        island = known.island(name)
        assert island is not None
        declared = _declared(known, island, given)
        refuse_another_regions_bucket(known, island, run)
        if not (saves_moments(optimizer) or keeps_nothing(optimizer)):
            kind = type(optimizer).__name__
            LOG.warning("%s: the state of %s is not saved; after a restart it begins anew", name, kind)
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
