"""`diloco generate`: text that the newest committed parameters write."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.consent import AllowCode, named_here
from diloco_cli.cli.export import at_head
from diloco_cli.cli.output import print_json, progress, talk
from diloco_cli.cli.run_argument import OpenRun, RunArgument, open_run
from diloco_cli.escaping import escaped
from diloco_cli.randomness import seed as fresh_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diloco_cli.inference.generation import Causal
    from diloco_cli.inference.vocabulary import TextStream, Vocabulary

MAX_SEED = 2**63 - 1
TokenizerOption = typer.Option(
    None, "--tokenizer", metavar="FOLDER|NAME",
    help="Folder of a Hugging Face tokenizer, or its name on the Hub. Default: bytes, where they fit.",
)  # fmt: skip
DeviceOption = typer.Option("cpu", "--device", help="Where to compute.", autocompletion=complete.devices)


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
    as_json: bool = typer.Option(False, "--json", help="One JSON object at the end."),
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
    from diloco_cli.runtime.consent import consented
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
