"""`diloco data`: makes token shards of text, writes the index of shards that are there, and shows and checks them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from diloco_cli.cli.operators import JsonOption
from diloco_cli.cli.output import ProgressLine, print_json, progress, talk
from diloco_cli.cli.run_argument import foreground_store
from diloco_cli.units import format_count, format_size

if TYPE_CHECKING:
    from diloco_cli.corpus.index import Index, Shard
    from diloco_cli.corpus.text import TextFile
    from diloco_cli.corpus.tokenizing import Tokenized
    from diloco_cli.store.port import Store

Dtype = Literal["uint16", "uint32"]
PlaceArgument = typer.Argument(..., metavar="PATH|URL", help="The folder of the shards, or gs:// or s3://.")
TokenizerOption = typer.Option(None, "--tokenizer", metavar="FOLDER", help="With a Hugging Face tokenizer.json.")
DtypeOption = typer.Option(None, "--dtype", help="uint16 or uint32 for each token.")

data = typer.Typer(help="Token shards: your own data.", no_args_is_help=True, rich_markup_mode=None)


@data.command("tokenize")
def tokenize(
    inputs: list[str] = typer.Argument(..., metavar="INPUT...", help="Text files, folders, or 'patterns/**/*.txt'."),
    output: str = typer.Option(..., "-o", "--output", metavar="PATH|URL", help="Where the shards go."),
    tokenizer: Path | None = TokenizerOption,
    dtype: Dtype | None = DtypeOption,
    as_json: bool = JsonOption,
) -> None:
    """Make token shards of text: its bytes, or by a tokenizer. The same command goes on after it was interrupted."""
    from diloco_cli.corpus.encoders import encoder_of
    from diloco_cli.corpus.text import find_sources
    from diloco_cli.corpus.tokenizing import tokenize as make

    sources = find_sources(inputs)
    encoder = encoder_of(None if tokenizer is None else str(tokenizer))
    store = _opened(output, create=True)
    with progress(f"tokenizing {len(sources)} files") as line:
        index = make(store, sources, encoder, dtype, on_shard=_Teller(sources, line))
    _tell_index("data tokenize", store, index, as_json)


@data.command("index")
def index(
    place: str = PlaceArgument,
    tokenizer: Path | None = TokenizerOption,
    dtype: Dtype | None = DtypeOption,
    as_json: bool = JsonOption,
) -> None:
    """Write index.json beside .bin or .npy shards that are there already; each is read once."""
    from diloco_cli.corpus.encoders import encoder_of
    from diloco_cli.corpus.indexing import index_shards

    encoder = None if tokenizer is None else encoder_of(str(tokenizer))
    store, read = _opened(place), 0
    with progress("reading the shards") as line:

        def tell(name: str, num_bytes: int) -> None:
            nonlocal read
            read += num_bytes
            line.text = f"reading {name}: {format_size(read)} in all"

        found = index_shards(store, dtype, encoder, tell)
    _tell_index("data index", store, found, as_json)


@data.command("show")
def show(
    place: str = PlaceArgument,
    check: bool = typer.Option(False, "--check", help="Read all of it, and compare every block with the index."),
    as_json: bool = JsonOption,
) -> None:
    """What token shards there are; with --check, whether they are what their index says (exit 11 if not)."""
    from diloco_cli.corpus.index import read_index
    from diloco_cli.corpus.shards import TokenShards

    store = _opened(place)
    index = read_index(store)
    shards = TokenShards(store, index)
    shards.check_sizes()
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

    def __init__(self, sources: list[TextFile], line: ProgressLine) -> None:
        self._before = [0]
        for source in sources:
            self._before.append(self._before[-1] + source.size)
        self._line = line

    def __call__(self, shard: Shard, made: Tokenized) -> None:
        whole = (made.file, made.offset) == (0, 0)
        share = 1.0 if whole else (self._before[made.file] + made.offset) / self._before[-1]
        self._line.share = lambda: share
        talk(f"{shard.name}: {format_count(shard.tokens)} tokens, {share:.0%} of the text")


def _opened(place: str, create: bool = False) -> Store:
    from diloco_cli.store.open import open_store
    from diloco_cli.store.port import StoreGoneError

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
    print(f"{store.url}: {index.num_tokens:,} tokens in {len(index.shards)} shards, {size} of {index.dtype}")
    print(f"  vocabulary  {index.vocabulary}")
    print(f"  tokenizer   {index.tokenizer or 'bytes, or not known'}")
    print(f"  digest      {index.digest}")
    if more.get("checked"):
        print("ok: every block is what the index says")
    if command != "data show":
        talk(f"hint: in run.yaml: data: {{tokens: {store.url}}}")
