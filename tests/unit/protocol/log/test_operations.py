"""Steps beside each other: their results, their failures, and what is on its way at a time."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli.errors import StoreError
from diloco_cli.protocol.log.operations import MAX_AT_ONCE, Create, Get, Now, Steps, There, Together, there, together


def reads(*keys: str, max_bytes: int = 10) -> Steps[str]:
    """The answers, one after the other."""
    found = ""
    for key in keys:
        found += yield Get(key, max_bytes)
    return found


def performed(steps: Steps[Any], failing: str = "") -> tuple[Any, list[list[str]]]:
    """The result, and the keys of each portion of operations; each is answered by its key in capitals."""
    portions: list[list[str]] = []

    def answer(operation: Any) -> Any:
        operation = operation.operation if isinstance(operation, There) else operation
        return ValueError(operation.key) if operation.key == failing else operation.key.upper()

    sent: Any = None
    while True:
        try:
            operation = steps.throw(sent) if isinstance(sent, Exception) else steps.send(sent)
        except StopIteration as stop:
            return stop.value, portions
        if isinstance(operation, Now):
            sent = 7.0
            continue
        asked = operation.operations if isinstance(operation, Together) else (operation,)
        answers = [answer(one) for one in asked]
        portions.append([getattr(one, "operation", one).key for one in asked])
        sent = answers if isinstance(operation, Together) else answers[0]


def test_operations_of_all_members_go_out_at_once_and_each_member_goes_on_with_its_own_answer() -> None:
    found, portions = performed(together([reads("a", "b"), reads("c"), reads("d", "e", "f")]))
    assert found == ["AB", "C", "DEF"]
    assert portions == [["a", "c", "d"], ["b", "e"], ["f"]]


def test_nothing_is_asked_for_members_without_an_operation() -> None:
    assert performed(together([reads(), reads()])) == (["", ""], [])
    assert performed(together([])) == ([], [])


def test_a_failure_is_its_members_alone_and_is_raised_when_all_have_ended() -> None:
    done: list[str] = []

    def notes(*keys: str) -> Steps[None]:
        done.append((yield from reads(*keys)))

    with pytest.raises(ValueError, match="b"):
        performed(together([notes("a", "b"), notes("c", "d", "e")]), failing="b")
    assert done == ["CDE"]


def test_a_member_may_answer_a_failure_itself() -> None:
    def tolerant() -> Steps[str]:
        try:
            return (yield from reads("b"))
        except ValueError:
            return (yield from reads("again"))

    assert performed(together([tolerant(), reads("c")]), failing="b")[0] == ["AGAIN", "C"]


def test_objects_on_their_way_have_a_bound_in_bytes() -> None:
    members = [reads(key, max_bytes=size) for key, size in (("a", 60), ("b", 40), ("c", 1), ("d", 500), ("e", 99))]
    found, portions = performed(together(members, max_bytes=100))
    assert found == ["A", "B", "C", "D", "E"]
    assert portions == [["a", "b"], ["c"], ["d"], ["e"]], "the largest goes alone"


def test_who_has_begun_goes_on_first_so_that_few_hold_an_object() -> None:
    members = [reads(*keys, max_bytes=60) for keys in (("a", "b"), ("c", "d"), ("e",))]
    found, portions = performed(together(members, max_bytes=120))
    assert found == ["AB", "CD", "E"] and portions == [["a", "c"], ["b", "d"], ["e"]]


def test_no_more_operations_go_out_than_there_are_connections() -> None:
    found, portions = performed(together([reads(str(number)) for number in range(100)]))
    assert found == [str(number) for number in range(100)]
    assert list(map(len, portions)) == [MAX_AT_ONCE, MAX_AT_ONCE, 100 - 2 * MAX_AT_ONCE]


def test_an_error_of_the_store_does_not_hide_another() -> None:
    def fails(error: Exception) -> Steps[None]:
        yield Get("a", 10)
        raise error

    for errors in ([StoreError("503"), AssertionError()], [AssertionError(), StoreError("503")]):
        with pytest.raises(AssertionError):
            performed(together([fails(error) for error in errors]))


def test_creates_count_by_their_data() -> None:
    def writes(key: str) -> Steps[str]:
        return (yield Create(key, bytes(60)))  # type: ignore[no-any-return]

    assert performed(together([writes("a"), writes("b")], max_bytes=100))[1] == [["a"], ["b"]]


def test_clocks_are_read_at_once_and_members_may_have_members() -> None:
    def timed() -> Steps[float]:
        before: float = yield Now()
        yield from reads("a")
        return before

    found, portions = performed(together([timed(), together([reads("b"), reads("c")])]))
    assert found == [7.0, ["B", "C"]]
    assert sorted(key for portion in portions for key in portion) == ["a", "b", "c"]


def test_steps_for_another_store_stay_together_there() -> None:
    steps = there(together([reads("a"), reads("b")]))
    assert next(steps) == Together((There(Get("a", 10)), There(Get("b", 10))))
