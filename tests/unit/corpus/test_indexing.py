"""An index of shards that are there."""

from __future__ import annotations

import re
import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from diloco_cli.corpus.encoders import ByteEncoder
from diloco_cli.corpus.index import check_sizes, read_index
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
    check_sizes(store, index)
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
        ({"a_bin": np.array([300], dtype="<u2").tobytes(), "index_json": b"x"}, UsageError, "an index already"),
    ],
)
def test_files_that_are_no_shards_are_refused(files, error, said):
    with pytest.raises(error, match=said):
        index_shards(store_of(**files))


def test_each_shard_is_read_by_its_own_header() -> None:
    """A shard of llm.c and a bare one, beside Megatron's index of it."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 3
    store = store_of(a_bin=header.tobytes() + np.arange(3, dtype="<u2").tobytes())
    store.put("b.bin", np.arange(3, 5, dtype="<u2").tobytes())
    store.put("b.idx", struct.pack("<9sQBQQiqqq", b"MMIDIDX", 1, 8, 1, 2, 2, 0, 0, 1))
    index = index_shards(store)
    assert list(TokenShards(store, index).read(0, 5)) == [0, 1, 2, 3, 4] and index.vocabulary == 5


def test_shards_that_are_named_as_held_out_and_values_that_are_half_of_all_are_told() -> None:
    told: list[str] = []
    many = np.arange(100, dtype="<u2").tobytes()
    index_shards(store_of(fineweb_train_bin=many, fineweb_val_bin=np.full(100, 7, "<u2").tobytes()), warn=told.append)
    assert "fineweb.val.bin: token 7 is 100%" in told[0] and "fineweb.val.bin is trained on" in told[1]
    told.clear()
    index_shards(store_of(valley_bin=many, latest_bin=many), warn=told.append)
    index_shards(store_of(val_bin=many), warn=told.append)
    assert not told, "other words, or all that there is"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train/state.json", "--dataset mem"),
        ("dataset_dict.json", "--dataset mem"),
        ("data-00000-of-00001.arrow", "--dataset mem"),
        ("a.ds", "name them .bin"),
        ("shard.00000.mds", "MosaicML"),
        ("below/a.bin", "diloco data index memory://.*/below"),
        ("notes.txt", "diloco data tokenize INPUT"),
    ],
)
def test_where_there_are_no_shards_what_is_there_says_what_to_type(name: str, said: str) -> None:
    store = MemoryStore()
    store.put(name, b"1234")
    with pytest.raises(NotFoundError) as raised:
        index_shards(store)
    assert re.search(said, raised.value.hint or "")


def test_a_number_that_no_vocabulary_has_is_refused() -> None:
    with pytest.raises(UsageError, match="which is of no vocabulary"):
        index_shards(store_of(a_bin=np.full(100, -100, "<i4").tobytes()), "uint32")


def test_tokens_that_a_tokenizer_does_not_have_are_not_its_own():
    store = store_of(a_bin=np.array([300], dtype="<u2").tobytes())
    with pytest.raises(UsageError, match="wrong tokenizer: there is a token 300, and it has only 256"):
        index_shards(store, encoder=ByteEncoder())


def test_shards_that_are_still_being_made_get_no_index():
    store = store_of(a_bin=b"12")
    store.put(PROGRESS_KEY, b"{}")
    with pytest.raises(UsageError, match="not all of it is"):
        index_shards(store)
