"""What is done with the newest committed parameters: `diloco export`, `diloco generate`, `diloco evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from diloco_cli.cli.arguments import (
    AllowCode,
    AllowStore,
    EndJsonOption,
    JsonOption,
    OpenRun,
    RunArgument,
    complete_devices,
    head_of,
    named_here,
    open_run,
)
from diloco_cli.cli.output import print_json, progress, refuse_place, talk, writing_to
from diloco_cli.errors import DataCheckError, UsageError, escaped
from diloco_cli.protocol.log.state import RunPhase, RunState
from diloco_cli.quantities import format_size, parse_size
from diloco_cli.randomness import seed as fresh_seed
from diloco_cli.runtime.consent import consented

if TYPE_CHECKING:
    from diloco_cli.inference.generation import Causal
    from diloco_cli.inference.vocabulary import TextStream, Vocabulary

MODEL = Path("model.safetensors")
MAX_SHARD_SIZE = "5GB"
Result = TypeVar("Result")


class Kind(StrEnum):
    safetensors = "safetensors"
    torch = "torch"
    hf = "hf"


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    run: str | None = RunArgument,
    output: Path | None = typer.Option(
        None, "-o", "--output", help=f"File to write, with --to hf a folder. Default: {MODEL}, or RUN-hf."
    ),
    to: Kind = typer.Option(
        Kind.safetensors,
        "--to",
        help="safetensors: what the run trains; torch: all that load_state_dict of the model demands; hf: a folder "
        "for from_pretrained.",
    ),
    dtype: Dtype | None = typer.Option(
        None, "--dtype", help="Type of the numbers. Default: each tensor's own; with --to hf float32."
    ),
    max_shard_size: str | None = typer.Option(
        None, "--max-shard-size", metavar="SIZE", help=f"With --to hf: of one file. Default: {MAX_SHARD_SIZE}."
    ),
    tokenizer: str | None = typer.Option(
        None, "--tokenizer", metavar="FOLDER|NAME", help="With --to hf: the tokenizer to put into the folder."
    ),
    yes: bool = typer.Option(False, "-y", "--yes", help="Overwrite an existing file, or an earlier export's folder."),
    as_json: bool = JsonOption,
    allow_code: list[str] = AllowCode,
) -> None:
    """Write the newest committed parameters as safetensors."""
    if to is not Kind.hf and (max_shard_size is not None or tokenizer is not None):
        raise UsageError("--max-shard-size and --tokenizer belong to a folder for transformers", hint="add --to hf")
    if to is Kind.hf:
        max_shard_bytes = parse_size(max_shard_size or MAX_SHARD_SIZE)
        _export_folder(run, output, dtype or Dtype.float32, max_shard_bytes, tokenizer, yes, as_json)
        return
    path = output or MODEL
    refuse_place(path, hint="give another file, or -y to overwrite it", overwrite=yes)
    _export_file(open_run(run), path, to, dtype, as_json, allow_code)


def at_head(opened: OpenRun, read: Callable[[RunState], Result]) -> tuple[RunState, Result]:
    """What `read` makes of the newest commit's versions; once more of a newer commit where they were collected while
    they were being read."""
    state = head_of(opened)
    while True:
        try:
            return state, read(state)
        except DataCheckError:
            before, state = state, head_of(opened, state)
            if state.gc_floor == before.gc_floor:
                raise


def _export_file(
    opened: OpenRun, path: Path, kind: Kind, dtype: Dtype | None, as_json: bool, allow_code: list[str]
) -> None:
    from diloco_cli.export import files, naming

    layout = opened.format.layout
    if kind is Kind.torch:
        settings = consented(opened.format, opened.url, named_here(allow_code), data=False).settings
        names = naming.whole_state(settings, layout, tied=True)
    else:
        names = naming.own_names(layout)
    chosen = None if dtype is None else naming.TYPES[dtype]
    with writing_to(path), progress(f"reading the parameters of {opened.name}"):
        state, size_bytes = at_head(
            opened,
            lambda state: files.export_file(opened.format, state, opened.store, path, names, chosen),
        )
    if as_json:
        print_json("export", {"run": opened.name, "file": str(path), "commit": state.n, "bytes": size_bytes})
    else:
        print(f"{path}: {layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}")


def _export_folder(
    run: str | None,
    output: Path | None,
    dtype: Dtype,
    max_shard_bytes: int,
    tokenizer: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    from diloco_cli.corpus.encoders import tokenizer_folder
    from diloco_cli.export import files, naming
    from diloco_cli.export.files import refuse_folder

    if output is not None:
        refuse_folder(output, yes)
    opened = open_run(run)
    folder = output or Path(f"{opened.name}-hf")
    refuse_folder(folder, yes)
    settings, layout = opened.format.settings, opened.format.layout
    described = naming.describe(settings, layout, naming.TYPES[dtype])
    words = naming.tokenizer_of(settings, None if tokenizer is None else tokenizer_folder(tokenizer, talk))
    if words is not None:
        talk(f"with the tokenizer of {words}")
    with writing_to(folder), progress(f"reading the parameters of {opened.name}"):
        state, (size_bytes, names) = at_head(
            opened,
            lambda state: files.export_folder(
                opened.format, state, opened.store, folder, described, naming.TYPES[dtype], max_shard_bytes, words
            ),
        )
    if as_json:
        facts = {"run": opened.name, "file": str(folder), "commit": state.n, "bytes": size_bytes, "files": names}
        print_json("export", facts)
    else:
        what = f"{layout.num_parameters:,} parameters of run {opened.name}, commit {state.n}"
        print(f"{folder}: {what}, {dtype}, {len(names)} files, {format_size(size_bytes)}")


MAX_SEED = 2**63 - 1
TokenizerOption = typer.Option(
    None,
    "--tokenizer",
    metavar="FOLDER|NAME",
    help="Folder of a Hugging Face tokenizer, or its name on the Hub. Default: bytes, where they fit.",
)
DeviceOption = typer.Option("cpu", "--device", help="Where to compute.", autocompletion=complete_devices)


def generate(
    run: str | None = RunArgument,
    prompt: str = typer.Option("", "--prompt", help="What the text begins with."),
    tokens: int = typer.Option(200, "--tokens", min=1, max=1_000_000, help="How many tokens to write."),
    temperature: float = typer.Option(1.0, "--temperature", min=0.0, help="0: always the most likely token."),
    top_k: int = typer.Option(0, "--top-k", min=0, help="Draw among so many most likely tokens; 0: among all."),
    seed: int | None = typer.Option(
        None, "--seed", min=0, max=MAX_SEED, help="The same text again. Default: another each time."
    ),
    tokenizer: str | None = TokenizerOption,
    device: str = DeviceOption,
    as_json: bool = EndJsonOption,
    allow_code: list[str] = AllowCode,
) -> None:
    """Write text with the newest committed parameters, as it is sampled."""
    from diloco_cli.inference.generation import Draw, sample
    from diloco_cli.inference.vocabulary import TextStream

    opened = open_run(run)
    commit, model, vocabulary = causal_of(opened, tokenizer, device, allow_code)
    begin = vocabulary.encode(prompt) or [vocabulary.begin]
    model.check(begin)
    draw = Draw(temperature, top_k, fresh_seed() if seed is None else seed)
    drawn, stream = sample(model, begin, tokens, draw, vocabulary.size), TextStream(vocabulary)
    parts = _parts(drawn, stream, vocabulary.end)
    if as_json:
        text = "".join(parts)
        facts = {"run": opened.name, "commit": commit, "prompt": prompt, "text": text, "seed": draw.seed}
        print_json("generate", facts | {"tokens": stream.num_tokens})
        return
    talk(f"run {opened.name}, commit {commit}, seed {draw.seed}")
    _show(prompt)
    for part in parts:
        _show(part)
    print()


def causal_of(
    opened: OpenRun, tokenizer: str | None, device: str, allow_code: list[str]
) -> tuple[int, Causal, Vocabulary]:
    """The number of the newest commit, its model, and how text is written for it."""
    from diloco_cli.inference.generation import Causal, load_model
    from diloco_cli.inference.vocabulary import vocabulary_of
    from diloco_cli.training.devices import choose_device

    where = choose_device(device)
    run = consented(opened.format, opened.url, named_here(allow_code), data=False)
    with progress(f"reading the parameters of {opened.name}"):
        state, model = at_head(opened, lambda state: load_model(run, state, opened.store, where))
    causal = Causal(run.settings, model)
    return state.n, causal, vocabulary_of(run.settings, tokenizer, causal.vocabulary)


def _parts(drawn: Iterator[int], stream: TextStream, end: int | None) -> Iterator[str]:
    """The text of the tokens up to the end of the text, if that comes."""
    for token in drawn:
        if token == end:
            break
        yield stream.add(token)
    yield stream.rest()


def _show(text: str) -> None:
    """Into a file or a pipe as it is; what a terminal gets must not control it."""
    sys.stdout.write(escaped(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def evaluate(
    run: str | None = RunArgument,
    limit: int | None = typer.Option(
        None, "--limit", min=1, help="So many held-out sequences. Default: as the run evaluates."
    ),
    device: str = DeviceOption,
    as_json: bool = JsonOption,
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Evaluate the newest committed parameters: the held-out loss."""
    from diloco_cli.inference.generation import load_model
    from diloco_cli.syncer.evaluation import FINAL_FACTOR, held_out_loss
    from diloco_cli.tasks.build import build_data
    from diloco_cli.training.devices import choose_device

    opened, here, where = open_run(run), named_here(allow_code, allow_store), choose_device(device)
    run_format = consented(opened.format, opened.url, here)
    with progress(f"evaluating the parameters of {opened.name}"):
        state, model = at_head(opened, lambda state: load_model(run_format, state, opened.store, where))
        factor = FINAL_FACTOR if state.phase is RunPhase.FINISHED else 1
        sequences = limit or run_format.settings.evaluation.sequences * factor
        loss = held_out_loss(model, build_data(run_format.settings, ("held_out",)), sequences)
    finite = loss if abs(loss) < float("inf") else None
    if as_json:
        print_json("evaluate", {"run": opened.name, "commit": state.n, "loss": finite, "sequences": sequences})
    else:
        said = "not finite" if finite is None else f"{loss:.4f} nats per token"
        print(f"run {opened.name}, commit {state.n}: held-out loss {said}, over at most {sequences:,} sequences")
