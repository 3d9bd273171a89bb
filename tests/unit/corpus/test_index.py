"""The index beside token shards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diloco_cli.corpus import index as index_module
from diloco_cli.corpus.index import (
    INDEX_KEY,
    Index,
    Shard,
    check_sizes,
    dtype_for,
    encode_index,
    parse_index,
    read_index,
)
from diloco_cli.errors import DataCheckError, NotFoundError, UsageError
from diloco_cli.store.memory import MemoryStore


def test_the_digest_of_an_index_is_of_all_that_it_says():
    changes = [{"vocabulary": 99}, {"shards": INDEX.shards * 2}, {"tokenizer": "t"}]
    assert len({INDEX.digest, *(replace(INDEX, **change).digest for change in changes)}) == 4
    assert index_module.BLOCK_BYTES == 4 << 20


INDEX = Index("uint16", 300, (Shard("a.bin", 10, ("0" * 32,)), Shard("b.npy", 3_000_000, ("1" * 32,) * 2, 128)))


def test_an_index_is_read_as_it_was_written():
    assert parse_index(encode_index(INDEX), "x") == INDEX
    assert (INDEX.num_tokens, INDEX.item_bytes) == (3_000_010, 2)
    assert (dtype_for(1 << 16), dtype_for((1 << 16) + 1)) == ("uint16", "uint32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "format must be 1"),
        ({"dtype": "int64"}, "dtype must be uint16 or uint32"),
        ({"vocabulary": 70_000}, "does not fit uint16"),
        ({"shards": []}, "names no shard"),
        ({"shards": [{"name": "../a", "tokens": 1, "blocks": ["0"]}]}, "plain name"),
        ({"shards": [{"name": "a", "tokens": 1, "blocks": []}]}, "a sum for each block"),
        ({"shards": 3}, "shards"),
        ({"more": 3}, "more"),
    ],
)
def test_an_index_that_no_reader_could_use_is_refused_with_its_place(change, said):
    data = json.dumps(json.loads(encode_index(INDEX)) | change).encode()
    with pytest.raises(UsageError, match=said) as raised:
        parse_index(data, "there/index.json")
    assert raised.value.where == "there/index.json"


def test_without_an_index_the_way_to_one_is_said():
    store = MemoryStore()
    with pytest.raises(NotFoundError, match=r"no index\.json") as raised:
        read_index(store)
    assert "diloco data tokenize" in str(raised.value.hint)
    store.put(INDEX_KEY, b"[]")
    with pytest.raises(UsageError, match="no index of token shards"):
        read_index(store)


@pytest.mark.parametrize(("data", "said"), [(bytes(10), "has 10 bytes, the index says 20"), (None, "is missing")])
def test_a_shard_of_another_size_is_found_before_any_reading(data: bytes | None, said: str) -> None:
    store, index = MemoryStore(), replace(INDEX, shards=INDEX.shards[:1])
    store.put("a.bin", bytes(20))
    check_sizes(store, index)
    store.delete("a.bin") if data is None else store.put("a.bin", data)
    with pytest.raises(DataCheckError, match=rf"shard a\.bin {said}"):
        check_sizes(store, index)
