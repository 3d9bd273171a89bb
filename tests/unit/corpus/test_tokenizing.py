"""Making shards of text, and an index of shards that are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diloco_cli.corpus import sources as text_module
from diloco_cli.corpus import tokenizing
from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import INDEX_KEY, read_index
from diloco_cli.corpus.shards import TokenShards
from diloco_cli.corpus.sources import find_sources
from diloco_cli.corpus.tokenizing import PROGRESS_KEY, tokenize
from diloco_cli.errors import UsageError
from diloco_cli.store.memory import MemoryStore

WORDS = ["the first text\nof two lines", "Zwölf Boxkämpfer\n" * 40, "漢字\n"]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_module, "PIECE_BYTES", 50)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, words in enumerate(WORDS):
        (folder / f"{number}.txt").write_text(words, encoding="utf-8")
    return folder


def objects(store: MemoryStore) -> dict[str, bytes | None]:
    return {key: store.get(key) for key in store.list("")}


def made(corpus: Path, store: MemoryStore) -> dict[str, bytes | None]:
    tokenize(store, find_sources([str(corpus)]), ByteEncoder(), shard_bytes=300)
    return objects(store)


def test_bytes_become_tokens_with_a_line_s_end_behind_each_document(corpus: Path) -> None:
    store = MemoryStore()
    made(corpus, store)
    index = read_index(store)
    assert (index.dtype, index.vocabulary, index.tokenizer) == ("uint16", 256, None)
    assert len(index.shards) > 3
    tokens = TokenShards(store, index).read(0, index.num_tokens)
    assert bytes(tokens.astype(np.uint8)).decode() == "".join(f"{words}\n" for words in WORDS)


class FailsAtOnePut(MemoryStore):
    """Its put number `last` fails, before or after the object is there."""

    def __init__(self, last: int, after: bool) -> None:
        super().__init__()
        self.left, self.after = last, after

    def put(self, key: str, data: bytes) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise ConnectionError(key)
        super().put(key, data)
        if self.left == 0:
            raise ConnectionError(key)


@pytest.mark.parametrize("after", [False, True])
def test_whatever_was_interrupted_ends_with_the_same_bytes(corpus: Path, after: bool) -> None:
    expected = made(corpus, MemoryStore())
    number = 0
    while True:
        number += 1
        store = FailsAtOnePut(number, after)
        try:
            made(corpus, store)
            break  # more puts than there are
        except ConnectionError:
            if store.stat(INDEX_KEY) is None:
                made(corpus, store)
        store.delete(PROGRESS_KEY)  # of one that ended between the index and this
        assert objects(store) == expected, f"put {number}"
    assert number > 8


class CountsPuts(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.keys: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        self.keys.append(key)
        self.bytes += len(data) if key == PROGRESS_KEY else 0
        super().put(key, data)


def test_telling_how_far_the_work_has_come_takes_no_bytes_that_grow_as_its_square(corpus: Path) -> None:
    """Of 256 and of 1,024 shards: four times as many have four times as much to say, and some more."""
    written = []
    for shards in (256, 1024):
        (corpus / "0.txt").write_text("x" * 150 * (shards - 10))
        store = CountsPuts()
        made(corpus, store)
        assert len(read_index(store).shards) == pytest.approx(shards, rel=0.02)
        written.append(store.bytes)
    assert written[1] < 6 * written[0]


def test_other_text_does_not_go_on_in_the_same_place(corpus: Path) -> None:
    store = FailsAtOnePut(4, after=True)
    with pytest.raises(ConnectionError):
        made(corpus, store)
    (corpus / "0.txt").write_text("changed")
    with pytest.raises(UsageError, match="text that has changed since"):
        made(corpus, store)


def test_finished_shards_and_foreign_ones_are_never_written_over(corpus: Path) -> None:
    store = MemoryStore()
    made(corpus, store)
    with pytest.raises(UsageError, match="finished token shards already"):
        made(corpus, store)
    foreign = MemoryStore()
    foreign.put("000000.bin", b"mine")
    with pytest.raises(UsageError, match="other shards"):
        made(corpus, foreign)
    assert objects(foreign) == {"000000.bin": b"mine"}


@pytest.mark.parametrize("bad", range(len(WORDS)))
@pytest.mark.parametrize("mends", [True, False])
def test_after_what_is_no_text_was_mended_or_left_out_the_same_command_goes_on(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, bad: int, mends: bool
) -> None:
    monkeypatch.setattr(tokenizing, "AT_ONCE_BYTES", 100)
    path, store = corpus / f"{bad}.txt", CountsPuts()
    path.write_bytes(b"fine\n" * 20 + b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text at byte 100") as raised:
        made(corpus, store)
    assert raised.value.where == str(path) and store.stat(INDEX_KEY) is None
    path.write_text("mended") if mends else path.unlink()
    before = {key for key in store.list("") if key.endswith(".bin")}
    assert bool(before) is (bad == 2), "the shards of what lies before it"
    store.keys.clear()
    assert made(corpus, store) == made(corpus, MemoryStore())
    assert not before & set(store.keys), "written once"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0", "binary: byte 8 is 0"),
        ("two words".encode("utf-16-le"), "binary: byte 1 is 0"),
        ("Boxk\u00e4mpfer".encode("latin-1"), "not UTF-8 text at byte 4"),
        ("\u6f22".encode() * 30 + "\u6f22".encode()[:2], "not UTF-8 text at byte 90"),
    ],
)
def test_what_is_no_text_is_refused_with_the_place_and_whole_characters_alone_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, said: str
) -> None:
    monkeypatch.setattr(text_module, "CHECKED_BYTES", 16)
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UsageError, match=said):
        tokenize(MemoryStore(), find_sources([str(tmp_path)]), ByteEncoder())
    (tmp_path / "a.txt").write_text("\u6f22" * 30 + "\n")
    assert tokenize(MemoryStore(), find_sources([str(tmp_path)]), ByteEncoder()).num_tokens == 92


def test_a_file_of_rows_is_refused_with_the_command_that_reads_rows(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1\0")
    with pytest.raises(UsageError, match="binary") as raised:
        tokenize(MemoryStore(), find_sources([str(tmp_path)]), ByteEncoder())
    assert f"--dataset {tmp_path}" in (raised.value.hint or "")


def test_a_type_too_small_for_the_vocabulary_is_refused(corpus: Path) -> None:
    encoder = ByteEncoder()
    encoder.vocabulary = 70_000
    with pytest.raises(UsageError, match="70000 tokens do not fit"):
        tokenize(MemoryStore(), find_sources([str(corpus)]), encoder, "uint16")
