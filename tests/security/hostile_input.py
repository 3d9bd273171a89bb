"""Hostile inputs made of honest ones, and what may not happen to the parser that gets one."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.security.parsers import Parser

MAX_S = 0.050
MAX_BYTES = 64 << 20
NUMBERS = (0, -1, 2**31, 2**53, 2**63, -(2**63), 10**30, 10**400, -0.0, 1e-320, 1e308, float("nan"), float("inf"))
TEXTS = (
    "", "nan", "Infinity", "-oProxyCommand=x", "../../etc/passwd", "..", "\x00", "\x1b[2J\x1b]0;x\x07", "\u202egnp",
    "\ud800", "𝟙", "١٢", "a" * 300, "x" * 5000, "1" * 5000, "blake3-" + "0" * 64, "gs://169.254.169.254/x", "http://[::1",
    "%2e%2e%2f", "~root", "9999-99-99", "1e999", "1_000", "!!python/object:os.system",
)  # fmt: skip
TOKENS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\t", b"\n", b"\x1b[31m", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
    b"\x00" * 64, b"\xff" * 8, (2**63 - 1).to_bytes(8, "little"), b"NaN", b"-Infinity", b"1e999", b"9" * 5000,
    b"[" * 2000, b'{"a":' * 1500, b"null", b'"schema":99,', b'"kind":"merge","kind":"stop",', b"{", b"]", b'"', b"'",
    b"\\", b"&a [*a, *a]", b"*a", b"<<: ", b"!!python/name:os.system ", b"%YAML 9.9\n", b"--- ", b"...\n", b"? ", b": ",
    b"|\n", b"#", b"- - - - - - - - - - - - - - - -", b"[1-999999999]", b"[1-2,", b"://", b"@", b"%",
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
)  # fmt: skip
TOWER = json.loads('{"a":' * 40 + "1" + "}" * 40)
STRANGE = st.sampled_from([*NUMBERS, *TEXTS, None, True, [], {}, [[]], {"": ""}, TOWER]) | st.integers(-(2**70), 2**70)


@st.composite
def hostile(draw: st.DrawFn, honest: Sequence[bytes]) -> bytes:
    """An honest input, changed once to four times: as JSON if it is that, or in its bytes."""
    data, times = draw(st.sampled_from(honest)), range(draw(st.integers(1, 4)))
    tree = _tree(data)
    if tree is not None and draw(st.booleans()):
        for _ in times:
            _change(draw, tree)
        deep = draw(st.sampled_from((0, 0, 0, 0, 40, 3000)))
        return b'{"a":' * deep + json.dumps(tree).encode() + b"}" * deep
    others = st.sampled_from(TOKENS) | st.binary(max_size=64) | st.sampled_from(honest)
    for _ in times:
        marks = [0, *(at + 1 for at, byte in enumerate(data[:1000]) if not chr(byte).isalnum()), len(data)]
        first = draw(st.sampled_from(marks) | st.integers(0, len(data)))
        end = draw(st.integers(first, min(len(data), first + draw(st.sampled_from((0, 1, 8, len(data)))))))
        between = draw(st.sampled_from((b"", data[first:end] * 2)) | others)
        data = data[:first] + between + data[end:]
    return data


def _tree(data: bytes) -> Any:
    try:
        tree = json.loads(data)
    except ValueError:
        return None
    return tree if isinstance(tree, dict | list) else None


def _change(draw: st.DrawFn, tree: Any) -> None:
    """One value goes, is doubled or becomes strange, or a strange key comes."""
    places = list(_places(tree))
    if not places:
        return
    inside, key = draw(st.sampled_from(places))
    how = draw(st.sampled_from(("strange", "strange", "strange", "gone", "doubled", "named")))
    if how == "gone":
        del inside[key]
    elif how == "strange":
        inside[key] = deepcopy(draw(STRANGE))  # which a further change may alter
    elif isinstance(inside, list):
        inside *= 2
    else:
        inside[draw(st.sampled_from(TEXTS))] = [inside[key]] * 2 if how == "doubled" else inside[key]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in the tree, as what holds it and its key there."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def fault_of(parser: Parser, data: bytes) -> str | None:
    """What is wrong with how the parser takes this input, if anything is. Slow means: slow three times in a row. A busy
    machine and a full garbage collector are nobody's fault."""
    for _ in range(3):
        began_s = time.process_time()
        try:
            with bounded_memory():
                parser.parse(data)
        except parser.declared:
            pass
        except Exception as error:  # whatever else comes out is a finding
            return f"{type(error).__name__}: {error!s:.200}"
        if time.process_time() - began_s <= MAX_S:
            return None
    return "slow"


@contextmanager
def bounded_memory(max_bytes: int = MAX_BYTES) -> Iterator[None]:
    """Until the end of the block this process cannot grow by more than the bound: what takes more is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
