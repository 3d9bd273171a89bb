"""A run in a directory that has just begun: its format, every version 0, commit 0. For processes of their own."""

from __future__ import annotations

from pathlib import Path

from diloco_cli.config.codec import replace
from diloco_cli.config.settings import DataSettings, InnerSettings, ModelSettings, OuterSettings, SyncSettings
from diloco_cli.digests import digest
from diloco_cli.launch.new_run import layout_of
from diloco_cli.protocol.log.commits import EpochStart
from diloco_cli.protocol.log.keys import FORMAT_KEY, commit_key, state_key, weights_key
from diloco_cli.protocol.log.records import FragmentVersion, RunFormat, encode
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.tasks.weights import carried
from tests.numerics.harness import make_run

ROOT = Path(__file__).resolve().parents[2]


def begun_run(
    directory: Path, model: str | ModelSettings, inner: InnerSettings | None = None,
    data: DataSettings | None = None, sync: SyncSettings = SyncSettings(every=4, fragments=2),
) -> tuple[RunFormat, Store, tuple[FragmentVersion, ...]]:  # fmt: skip
    """One learner `l0`, two fragments; nobody runs yet. `model`: its entrypoint, or settings; a Hugging Face config is
    carried, as `launch` does."""
    inner = inner or InnerSettings(lr=0.01, warmup_steps=0, save_every=1)
    run = make_run(1, 1000, sync, OuterSettings(), inner)
    settings = replace(
        run.settings,
        model=ModelSettings(entrypoint=model) if isinstance(model, str) else model,
        data=data or run.settings.data,
    )
    settings = carried(settings)
    run = replace(run, settings=settings, layout=layout_of(settings))
    store = open_store(directory.as_uri(), create=True)
    store.create(FORMAT_KEY, encode(run))
    outputs = []
    for fragment, merged in enumerate(TorchArithmetic(run).initial()):
        output = FragmentVersion(fragment, 0, -1, 1, digest(merged.state), digest(merged.weights))
        store.create(state_key(fragment, 0, 1, output.state_digest), merged.state)
        store.create(weights_key(fragment, 0, 1, output.weights_digest), merged.weights)
        outputs.append(output)
    first = EpochStart(n=0, epoch=1, nonce="nonce", time=run.created_at, outputs=tuple(outputs))
    store.create(commit_key(0), encode(first))
    return run, store, first.outputs
