"""The index of shards that somebody else made."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import read_index
from diloco_cli.corpus.indexing import index_shards
from diloco_cli.corpus.shards import TokenShards
from diloco_cli.corpus.tokenizing import PROGRESS_KEY
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.memory import MemoryStore


def array(values: Any, dtype: str) -> bytes:
    stream = BytesIO()
    np.save(stream, np.array(values, dtype=dtype))
    return stream.getvalue()


def store_of(**files: bytes) -> MemoryStore:
    store = MemoryStore()
    for name, data in files.items():
        store.put(name.replace("_", "."), data)
    return store


def test_bare_and_numpy_shards_are_one_stream_in_the_order_of_their_names():
    bare = np.arange(10, 15, dtype="<u2").tobytes()
    store = store_of(b_bin=bare, a_npy=array(np.arange(10).reshape(2, 5), "uint16"), notes_txt=b"not this")
    index = index_shards(store)
    assert index == read_index(store) and index.vocabulary == 15
    assert [(shard.name, shard.offset) for shard in index.shards] == [("a.npy", 128), ("b.bin", 0)]
    shards = TokenShards(store, index)
    shards.check_sizes()
    assert list(shards.read(0, 15)) == list(range(15))


def test_bare_shards_are_of_the_type_that_was_said():
    store = store_of(a_bin=np.array([1, 70_000], dtype="<u4").tobytes())
    index = index_shards(store, "uint32")
    assert (index.dtype, index.vocabulary, index.num_tokens) == ("uint32", 70_001, 2)


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, NotFoundError, r"no \.bin or \.npy files"),
        ({"a_bin": b"123"}, UsageError, "no whole number of uint16"),
        ({"a_bin": b""}, UsageError, "is empty"),
        ({"a_npy": b"no array at all"}, UsageError, "no array of numpy"),
        ({"a_npy": array([1], "int64")}, UsageError, "holds int64; allowed: uint16, uint32"),
        ({"a_npy": array([1], "uint16")[:-1]}, DataCheckError, "its header says"),
        ({"a_npy": array([1], "uint16"), "b_npy": array([1], "uint32")}, UsageError, "several types"),
        ({"a_bin": np.array([300], dtype="<u2").tobytes(), "index_json": b"x"}, UsageError, "finished"),
    ],
)
def test_files_that_are_no_shards_are_refused(files, error, said):
    with pytest.raises(error, match=said):
        index_shards(store_of(**files))


def test_tokens_that_a_tokenizer_does_not_have_are_not_its_own():
    store = store_of(a_bin=np.array([300], dtype="<u2").tobytes())
    with pytest.raises(UsageError, match="wrong tokenizer: there is a token 300, and it has only 256"):
        index_shards(store, encoder=ByteEncoder())


def test_shards_that_are_still_being_made_get_no_index():
    store = store_of(a_bin=b"12")
    store.put(PROGRESS_KEY, b"{}")
    with pytest.raises(UsageError, match="not all of it is"):
        index_shards(store)
