"""Hostile inputs from honest ones: bytes turned, cut, doubled and spliced; JSON with strange values in strange places.

All draws come from one seeded generator, so an input is repeated by its seed and number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, -1e308,
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "a", "nan", "Infinity", "-", "--help", "-oProxyCommand=x", "../../etc/passwd", "/etc/passwd", "..", ".",
    "\x00", "\x1b[2J\x1b]0;x\x07", "\u202egnp", "\ud800", "é", "𝟙", "١٢", "a" * 300, "x" * 5000, "1" * 5000, "e" * 64,
    "blake3-" + "0" * 64, "gs://169.254.169.254/x", "http://[::1", "$(id)", "`id`", ";id", "%00", "%2e%2e%2f", "~root",
    "2026-01-01T00:00:00.000Z", "9999-99-99", "1e999", "1_000", "0x10", "true", "null", "!!python/object:os.system",
)  # fmt: skip
TOKENS: tuple[bytes, ...] = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\t", b"\n", b"\x1b[31m", b"\xe2\x80\xae", b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80", b"\x00" * 64, b"\xff" * 8, (2**63 - 1).to_bytes(8, "little"),
    b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 2000, b'{"a":' * 1500, b"[[[[[[[[[[[[[[[[", b"true", b"null",
    b'"schema":99,', b'"kind":"merge","kind":"stop",', b"{", b"}", b"]", b'"', b"'", b"\\",
    b"&a [*a, *a]", b"*a", b"&a ", b"<<: ", b"!!python/name:os.system ", b"!x ", b"%YAML 9.9\n", b"--- ", b"...\n",
    b"? ", b": ", b"|\n", b">9\n", b"#", b"- - - - - - - - - - - - - - - -",
    b"[1-999999999]", b"[1-2,", b"..", b"://", b"@", b"%",
)  # fmt: skip


def mutated(chance: Random, seeds: Sequence[bytes]) -> bytes:
    """One input: an honest one, changed once to eight times, in its bytes or as JSON."""
    data = chance.choice(seeds)
    if chance.random() < 0.5 and data[:1] in (b"{", b"["):
        changed = _mutated_json(chance, data)
        if changed is not None and chance.random() < 0.9:
            return changed
        data = changed if changed is not None else data
    for _ in range(min(8, 1 + int(chance.expovariate(0.7)))):
        data = _mutated_bytes(chance, data, seeds)
    return data


def _mutated_bytes(chance: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    first, second = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    match chance.randrange(9):
        case 0:
            return data[:first]
        case 1:
            return data[:first] + data[second:]
        case 2:
            return data[:second] + data[first:]
        case 3 if data:
            at = chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 4:
            return data[:first] + chance.choice(TOKENS) + data[first:]
        case 5:
            return data[:first] + chance.choice(TOKENS) + data[second:]
        case 6:
            other = chance.choice(seeds)
            return data[:first] + other[chance.randint(0, len(other)) :]
        case 7:
            return data[:first] + chance.choice(TEXTS).encode("utf-8", "surrogatepass") + data[first:]
        case _:
            return data[:first] + chance.randbytes(chance.choice((1, 8, 64))) + data[second:]


def _mutated_json(chance: Random, data: bytes) -> bytes | None:
    try:
        tree = json.loads(data)
    except ValueError:
        return None
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        tree = _with_strangeness(chance, tree)
    if chance.random() < 0.1:
        deep = chance.choice((20, 40, 3000))
        return b'{"a":' * deep + json.dumps(tree).encode() + b"}" * deep
    return json.dumps(tree).encode()


def _with_strangeness(chance: Random, tree: Any) -> Any:
    """The tree with one node, drawn on a walk from the root, changed."""
    if isinstance(tree, dict) and tree and chance.random() < 0.85:
        key = chance.choice(sorted(tree))
        match chance.randrange(8):
            case 0:
                return {other: value for other, value in tree.items() if other != key}
            case 1:
                return tree | {chance.choice(TEXTS): tree[key]}
            case _:
                return tree | {key: _with_strangeness(chance, tree[key])}
    if isinstance(tree, list) and tree and chance.random() < 0.85:
        at = chance.randrange(len(tree))
        match chance.randrange(6):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return tree * chance.choice((2, 50))
            case _:
                return [*tree[:at], _with_strangeness(chance, tree[at]), *tree[at + 1 :]]
    return strange_value(chance)


def strange_value(chance: Random) -> Any:
    match chance.randrange(6):
        case 0 | 1:
            return chance.choice(NUMBERS)
        case 2 | 3:
            return chance.choice(TEXTS)
        case 4:
            return chance.choice((None, True, False, [], {}, [[]], {"": ""}, [None], float("nan"), float("inf")))
        case _:
            return chance.randint(-(2**70), 2**70)
