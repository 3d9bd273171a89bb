"""The access templates as a judge: what the clouds would allow, worked out from the very text that users install.

Only the parts of the two languages that the templates use; anything else is an error, not a permission."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from diloco_cli.cli.key import PolicyRole as Role
from diloco_cli.cli.key import policy_of
from diloco_cli.paths import templates_directory
from diloco_cli.protocol.log.operations import Create, Delete, Get, List, Now, Operation, Put, Sleep

Verb = Literal["get", "create", "put", "delete", "list"]
BUCKET, RUN = "bucket", "runs/toy"
S3_ACTIONS: dict[str, str] = {
    "get": "s3:GetObject", "create": "s3:PutObject", "put": "s3:PutObject", "delete": "s3:DeleteObject",
    "list": "s3:ListBucket",
}  # fmt: skip
GCS_PERMISSIONS: dict[str, set[str]] = {
    "get": {"storage.objects.get"}, "create": {"storage.objects.create"}, "delete": {"storage.objects.delete"},
    "put": {"storage.objects.create", "storage.objects.delete"}, "list": {"storage.objects.list"},
}  # fmt: skip
_TERM = re.compile(r'resource\.name(?: == "([^"]+)"|\.startsWith\("([^"]+)"\))')


def verb_of(operation: Operation) -> tuple[Verb, str] | None:
    """The verb and the key, or for a listing the prefix; None for what does not touch the store."""
    match operation:
        case Get(key):
            return "get", key
        case Create(key, _):
            return "create", key
        case Put(key, _):
            return "put", key
        case Delete(key):
            return "delete", key
        case List(prefix, _, _):
            return "list", prefix
        case Now() | Sleep(_):
            return None
    raise AssertionError(f"an operation that no policy knows: {operation}")


def s3_allows(policy: dict[str, Any], verb: Verb, key: str) -> bool:
    """`key` within the run. A put is a PutObject without If-None-Match, a create one with it."""
    resource = f"arn:aws:s3:::{BUCKET}" if verb == "list" else f"arn:aws:s3:::{BUCKET}/{RUN}/{key}"
    facts = {"s3:if-none-match": "*"} if verb == "create" else {}
    facts |= {"s3:prefix": f"{RUN}/{key}"} if verb == "list" else {}
    assert all(statement["Effect"] == "Allow" for statement in policy["Statement"])
    return any(
        S3_ACTIONS[verb] == statement["Action"]
        and any(fnmatchcase(resource, pattern) for pattern in _listed(statement["Resource"]))
        and all(_holds(*condition, facts) for condition in _conditions(statement))
        for statement in policy["Statement"]
    )


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _conditions(statement: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for operator, tests in statement.get("Condition", {}).items():
        for name, value in tests.items():
            yield operator, name, value


def _holds(operator: str, name: str, value: str, facts: dict[str, str]) -> bool:
    match operator:
        case "Null":
            return (name not in facts) == (value == "true")
        case "Bool":
            return facts.get(name) == value
        case "StringLike":
            return name in facts and fnmatchcase(facts[name], value)
    raise AssertionError(f"a condition that this judge does not know: {operator}")


def gcs_allows(policy: dict[str, Any], verb: Verb, key: str) -> bool:
    """All permissions of the verb, each from some binding whose condition holds for this object."""
    roles = json.loads((templates_directory() / "bucket-policy" / "gcs" / "roles.json").read_text())
    name = f"projects/_/buckets/{BUCKET}" + ("" if verb == "list" else f"/objects/{RUN}/{key}")
    granted: set[str] = set()
    for binding in policy["bindings"]:
        assert binding["members"] == ["user:me"] and binding["role"].startswith("projects/p/roles/")
        condition = binding.get("condition")
        if condition is None or _true_of(condition["expression"], name):
            granted |= set(roles[binding["role"].rpartition("/")[2]])
    return granted >= GCS_PERMISSIONS[verb]


def _true_of(expression: str, name: str) -> bool:
    terms = [_TERM.fullmatch(term) for term in expression.split(" || ")]
    assert all(terms), f"a condition that this judge does not know: {expression}"
    return any(name == term[1] or (term[2] is not None and name.startswith(term[2])) for term in terms if term)


class Judge:
    """What each role may do by both clouds' templates. S3 tells replacing from deleting; on GCS whoever may replace may
    delete, and whoever may create and delete may replace."""

    def __init__(self) -> None:
        self._policies: dict[tuple[Role, str], tuple[dict[str, Any], dict[str, Any]]] = {}

    def allows(self, role: Role, learner: str, verb: Verb, key: str) -> bool:
        s3, gcs = self._policies_of(role, learner)
        by_gcs, by_s3 = gcs_allows(gcs, verb, key), s3_allows(s3, verb, key)
        if verb in ("put", "delete"):
            changes = any(s3_allows(s3, other, key) for other in ("put", "delete"))
            by_s3 = changes and (verb == "delete" or s3_allows(s3, "create", key))
        assert by_gcs == by_s3, f"S3 and GCS disagree on {verb} {key} by {role} {learner}"
        return by_gcs

    def _policies_of(self, role: Role, learner: str) -> tuple[dict[str, Any], dict[str, Any]]:
        if (role, learner) not in self._policies:
            self._policies[role, learner] = (
                json.loads(policy_of(f"s3://{BUCKET}/{RUN}", role, learner)),
                json.loads(policy_of(f"gs://{BUCKET}/{RUN}", role, learner, "p", "user:me")),
            )
        return self._policies[role, learner]
