"""`diloco data`: makes token shards of text, writes the index of shards that are there, and shows and checks them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import typer

from diloco_cli.cli.arguments import JsonOption, foreground_store
from diloco_cli.cli.output import ProgressLine, print_json, progress, talk
from diloco_cli.corpus.index import Index, Shard, check_sizes, read_index
from diloco_cli.environment import set_environment_default
from diloco_cli.errors import UsageError
from diloco_cli.quantities import format_count, format_size
from diloco_cli.store.open import open_store
from diloco_cli.store.port import Store, StoreGoneError

if TYPE_CHECKING:
    from diloco_cli.corpus.tokenizing import Documents, Tokenized

Dtype = Literal["uint16", "uint32"]
SPLIT, COLUMN = "train", "text"
PlaceArgument = typer.Argument(..., metavar="PATH|URL", help="The folder of the shards, or the URL of a bucket.")
TokenizerOption = typer.Option(
    None, "--tokenizer", metavar="FOLDER|NAME", help="Folder of a Hugging Face tokenizer.json, or its name on the Hub."
)
DtypeOption = typer.Option(None, "--dtype", help="uint16 or uint32 for each token.")

data = typer.Typer(help="Token shards: your own data.", no_args_is_help=True, rich_markup_mode=None)


@data.command("tokenize")
def tokenize(
    inputs: list[str] | None = typer.Argument(
        None, metavar="[INPUT...]", help="Text files, folders, or 'patterns/**/*.txt'."
    ),
    output: str = typer.Option(..., "-o", "--output", metavar="PATH|URL", help="Where the shards go."),
    tokenizer: str | None = TokenizerOption,
    dataset: str | None = typer.Option(
        None, "--dataset", metavar="FOLDER|NAME", help="Instead of files: a Hugging Face dataset, NAME@REVISION too."
    ),
    config: str | None = typer.Option(None, "--config", help="Of the dataset, if it has several."),
    split: str | None = typer.Option(None, "--split", help=f"Of the dataset; left out: {SPLIT}."),
    column: str | None = typer.Option(None, "--column", help=f"Of the dataset, with the text; left out: {COLUMN}."),
    dtype: Dtype | None = DtypeOption,
    as_json: bool = JsonOption,
) -> None:
    """Make token shards of text: its bytes, or by a tokenizer. The same command goes on after it was interrupted."""
    from diloco_cli.corpus.encoders import encoder_of
    from diloco_cli.corpus.tokenizing import tokenize as make

    encoder = encoder_of(tokenizer, talk)
    if dataset is None:
        _refuse_idle({"--config": config, "--split": split, "--column": column})
        sources, what = _files(inputs)
    else:
        sources, what = _rows(dataset, config, split or SPLIT, column or COLUMN, inputs)
    store = _opened(output, create=True)
    try:
        with progress(f"tokenizing {what}") as line:
            index = make(store, sources, encoder, dtype, on_shard=_Teller(sources, line))
    except KeyboardInterrupt:
        talk("interrupted: the same command goes on behind the last shard that is noted")
        raise
    _tell_index("data tokenize", store, index, as_json)


def _refuse_idle(options: dict[str, str | None]) -> None:
    """Options that have an effect on a dataset alone."""
    for option, value in options.items():
        if value is not None:
            hint = f"--dataset FOLDER|NAME {option} {value}, or leave {option} out"
            raise UsageError(f"{option} {value}: there is no --dataset that it is of", hint=hint)


def _files(inputs: list[str] | None) -> tuple[Documents, str]:
    from diloco_cli.corpus.sources import find_sources, markup_warning

    if not inputs:
        hint = "name text files, or --dataset FOLDER|NAME"
        raise UsageError("there is nothing to tokenize", hint=hint)
    found = find_sources(inputs)
    if (warning := markup_warning(file.name for file in found)) is not None:
        talk(warning)
    return found, f"{len(found)} files"


def _rows(dataset: str, config: str | None, split: str, column: str, inputs: list[str] | None) -> tuple[Documents, str]:
    from diloco_cli.corpus.sources import open_dataset

    if inputs:
        hint = "tokenize files and a dataset one after the other, each with its own -o"
        raise UsageError(f"--dataset {dataset} and {inputs[0]}: one of them", hint=hint)
    if not sys.stderr.isatty():
        set_environment_default("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    rows = open_dataset(dataset, config, split, column)
    talk(f"{rows.name}: {rows.num_rows:,} rows of {split}")
    return rows, f"{rows.num_rows:,} rows"


@data.command("index")
def index(
    place: str = PlaceArgument,
    tokenizer: str | None = TokenizerOption,
    dtype: Dtype | None = DtypeOption,
    as_json: bool = JsonOption,
) -> None:
    """Write index.json beside .bin or .npy shards that are there, of llm.c and Megatron too; each is read once."""
    from diloco_cli.corpus.encoders import encoder_of
    from diloco_cli.corpus.indexing import index_shards

    encoder = None if tokenizer is None else encoder_of(tokenizer, talk)
    store, read = _opened(place), 0
    with progress("reading the shards") as line:

        def tell(name: str, num_bytes: int) -> None:
            nonlocal read
            read += num_bytes
            line.text = f"reading {name}: {format_size(read)} in all"

        found = index_shards(store, dtype, encoder, tell, lambda line: talk(f"warning: {line}"))
    _tell_index("data index", store, found, as_json)


@data.command("show")
def show(
    place: str = PlaceArgument,
    check: bool = typer.Option(False, "--check", help="Read all of it, and compare every block with the index."),
    as_json: bool = JsonOption,
) -> None:
    """What token shards there are; with --check, whether they are what their index says (exit 11 if not)."""
    from diloco_cli.corpus.shards import TokenShards

    store = _opened(place)
    index = read_index(store)
    shards = TokenShards(store, index)
    check_sizes(store, index)
    if check:
        blocks = [(n, block) for n, shard in enumerate(index.shards) for block in range(len(shard.blocks))]
        with progress("checking") as line:
            for done, (number, block) in enumerate(blocks):
                share = done / len(blocks)
                line.share = lambda share=share: share  # type: ignore[misc]
                shards.check_block(number, block)
    _tell_index("data show", store, index, as_json, checked=check)


class _Teller:
    """Says of each finished shard how far the work has come."""

    def __init__(self, sources: Documents, line: ProgressLine) -> None:
        self._sources, self._line = sources, line

    def __call__(self, shard: Shard, made: Tokenized) -> None:
        whole = (made.file, made.offset) == (0, 0)
        share = 1.0 if whole else self._sources.share(made.file, made.offset)
        self._line.share = lambda: share
        talk(f"{shard.name}: {format_count(shard.tokens)} tokens, {share:.0%} of the text")


def _opened(place: str, create: bool = False) -> Store:
    if create:
        open_store(place, create=True)
    try:
        return foreground_store(place)
    except StoreGoneError as error:
        error.hint = f"name a place with token shards, or make them: diloco data tokenize FILES -o {place}"
        raise


def _tell_index(command: str, store: Store, index: Index, as_json: bool, **more: Any) -> None:
    found = {
        "url": store.url,
        "tokens": index.num_tokens,
        "shards": len(index.shards),
        "dtype": index.dtype,
        "vocabulary": index.vocabulary,
        "tokenizer": index.tokenizer,
        "digest": index.digest,
        **more,
    }
    if as_json:
        print_json(command, found)
        return
    size = format_size(index.num_tokens * index.item_bytes)
    print(f"{store.url}: {index.num_tokens:,} tokens, {size} of {index.dtype}; shards: {len(index.shards)}")
    print(f"  vocabulary  {index.vocabulary}")
    print(f"  tokenizer   {index.tokenizer or 'bytes, or not known'}")
    print(f"  digest      {index.digest}")
    if more.get("checked"):
        print("ok: every block is what the index says")
    if command != "data show":
        talk(f"hint: in run.yaml: data: {{tokens: {store.url}}}")
