"""Bucket policies per role, filled in from templates/bucket-policy."""

from __future__ import annotations

import re
from typing import Literal

from diloco_cli.errors import UsageError
from diloco_cli.paths import checked_name, templates_directory
from diloco_cli.store.url import parse_url

Role = Literal["learner", "syncer", "operator", "reader"]
_PLACE = re.compile(r"[A-Za-z0-9._/-]+")
_PRINCIPAL = re.compile(r"[A-Za-z0-9._:/@-]+")
_PLACEHOLDER = re.compile(r"@[A-Z]+@")


def policy_of(url: str, role: Role, learner: str = "", project: str = "", member: str = "") -> str:
    """JSON text of what `role` may do in the run at `url`; for s3:// an IAM policy, for gs:// bindings of a bucket.

    Raises UsageError if a name is missing or invalid, or if the store has no policies."""
    place = parse_url(url)
    if not place.kind.policies:
        raise UsageError(f"there are no policies for {place.scheme}://", where=url, hint=place.kind.policies_hint)
    values = {"BUCKET": place.place, "RUN": place.prefix, "PROJECT": project, "MEMBER": member}
    if role == "learner":
        values["LEARNER"] = checked_name(learner, "the name of a learner (--name)")
    text = (templates_directory() / "bucket-policy" / place.kind.policies / f"{role}.json").read_text()
    for name in sorted({found[1:-1] for found in _PLACEHOLDER.findall(text)}):
        text = text.replace(f"@{name}@", _checked(name, values[name], url))
    return text


def _checked(name: str, value: str, url: str) -> str:
    """The value, if it has no character that could end a JSON string or a condition's expression."""
    if not value:
        missing = "a run's URL ends with the run's name" if name == "RUN" else f"give --{name.lower()}"
        raise UsageError(f"no {name.lower()} is given", where=url, hint=missing)
    allowed = _PRINCIPAL if name == "MEMBER" else _PLACE
    if not allowed.fullmatch(value):
        raise UsageError(f"a {name.lower()} may consist of {allowed.pattern}, not {value!a}", where=url)
    return value
