"""The only module that builds object keys of a run.

    FORMAT.json                                  create-once: settings, islands, fragment layout
    plan.json                                    create-once: what was planned, for reports alone
    epoch/<e>.json                               create-once: which syncer claims epoch e
    incarnation/<learner>/<i>.json               create-once: which process is incarnation i of a learner
    offer/<learner>/<i>/<seq>.json               create-once, dense from the first one without an outcome
    delta/<learner>/<i>/<seq>-<digest>           the delta itself, written before its offer
    state/<fragment>/<version>-<epoch>-<digest>  float32 parameters and outer momentum, written before the commit
    weights/<fragment>/<version>-<epoch>-<digest>  what learners download, written before the commit
    commit/<n>.json                              the log: create-once, numbered without gaps, never deleted
    snapshot/<n>.json                            create-once: the folded log up to commit n
    inner/<learner>/<i>/<step>-<digest>          a learner's inner optimizer state: an optimisation
    certificate/<role>/<name>/<public key>.json  create-once: the operator has certified this key of a machine
    request/<r>.json                             create-once, dense: an operator's intent
    join/<learner>/<e>-<number>.json             create-once: an island asks the syncer of epoch e to take part
    event/<unit>/<t>-<nonce>.jsonl               create-once: what happened to a unit, for people (diloco_cli/events)
    heartbeat/<unit>.json, heartbeat/standby/<name>.json, hint/head.json, hint/job/<unit>.json
                                                 overwritten now and then: hints, never trusted for safety

Where <i> stands, a signed run has <key>/<i>: <key> is the fingerprint of the key that signs what lies below it. So a
key's numbers are its own: no other key can take them, and what a revoked key wrote is not looked at. In the log an
incarnation is one integer, `i` in an unsigned run and `i * 2**32 + fingerprint` in a signed one: it tells the place of
every offer, it is unique, and a later incarnation is greater, under whichever key it runs.

The learner's name comes early, so that a bucket policy can confine each learner to its own prefixes.

Every object has a largest possible size, and no more is read: no honest process writes a longer one. Records have
MAX_RECORD_BYTES (records.py), heartbeats MAX_HEARTBEAT_BYTES (heartbeats.py); all other
sizes follow from the run's layout (at the end of this file).
"""

from __future__ import annotations

import re

from diloco_cli.layout import Layout
from diloco_cli.signing import FINGERPRINT_DIGITS

FORMAT_KEY = "FORMAT.json"
PLAN_KEY = "plan.json"
HEAD_HINT_KEY = "hint/head.json"
SYNCER = "syncer"
STANDBY_HEARTBEATS = "heartbeat/standby/"
JOINS = "join/"
EVENTS = "event/"
EPOCHS = "epoch/"
CERTIFICATES = "certificate/"
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_VERSION = re.compile(r"(?:state|weights)/([0-9]{4,6})/([0-9]{12,15})-([0-9]{10,15})-([a-z0-9-]+)")
FINGERPRINT_BITS = 4 * FINGERPRINT_DIGITS
MOST_INCARNATIONS = 1 << 21  # of a learner, so that an incarnation is exact in every JSON reader
_OF_LEARNER = rf"({NAME_PATTERN.pattern})/(?:([0-9a-f]{{8}})/)?([0-9]{{8,15}})"
_CLAIM = re.compile(rf"incarnation/{_OF_LEARNER}\.json")
_DELTA = re.compile(rf"delta/{_OF_LEARNER}/([0-9]{{10,15}})-([a-z0-9-]+)")
_OFFER = re.compile(rf"offer/{_OF_LEARNER}/([0-9]{{10,15}})\.json")
_CERTIFICATE = re.compile(rf"certificate/learner/({NAME_PATTERN.pattern})/([0-9a-f]{{64}})\.json")
_COMMIT = re.compile(r"commit/([0-9]{12,15})\.json")
_SNAPSHOT = re.compile(r"snapshot/([0-9]{12,15})\.json")
_INNER = re.compile(rf"inner/{_OF_LEARNER}/([0-9]{{12,15}})-[^/]+")
_JOIN = re.compile(rf"join/({NAME_PATTERN.pattern})/([0-9]{{10,15}})-([0-9]{{4,8}})\.json")
_EVENTS = re.compile(rf"event/({NAME_PATTERN.pattern})/([0-9]{{13}})-[0-9a-f]{{1,32}}\.jsonl")
_OF_A_RUN = re.compile(
    r"(?:epoch|incarnation|offer|delta|state|weights|commit|snapshot|inner|certificate|request|join|event|heartbeat"
    r"|hint|parts-of-uploads)/.+|FORMAT\.json|plan\.json"
)
BYTES_PER_PARAMETER = 8
"""A state holds float32 parameters and momentum; a delta at most float32 values and as many norms; weights are less."""
LAST_MS = 10**13 - 1  # since the epoch: in the year 2286
HEADER_BYTES = 1 << 16  # of a payload: it names three tensors
MOMENTS_HEADER_BYTES = 8 << 20
MOMENTS_HEADER_BYTES_PER_TENSOR = 2 << 10  # the name, shape and place of both its moments


def is_name(text: str) -> bool:
    """Whether `text` may name a run, a learner or a region."""
    return NAME_PATTERN.fullmatch(text) is not None


def is_of_a_run(key: str) -> bool:
    """Whether a process of this project may have written the key; anything else beside it is its user's."""
    return _OF_A_RUN.fullmatch(key) is not None


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{epoch:010d}.json"


def fingerprint(public: str) -> int:
    """Of a public key, as it stands in object keys; 0 without one."""
    return int(public[:FINGERPRINT_DIGITS], 16) if public else 0


def incarnation_of(number: int, key: int) -> int:
    """Incarnation `number` of a learner under the key with this fingerprint (0: in an unsigned run)."""
    return (number << FINGERPRINT_BITS | key) if key else number


def number_of(incarnation: int) -> int:
    """The number that people see: how many processes the learner has had."""
    return incarnation >> FINGERPRINT_BITS or incarnation


def key_of(incarnation: int) -> int:
    """The fingerprint of the key under which an incarnation writes; 0 in an unsigned run."""
    return incarnation & ((1 << FINGERPRINT_BITS) - 1) if incarnation >> FINGERPRINT_BITS else 0


def _below(learner: str, incarnation: int) -> str:
    key = key_of(incarnation)
    return f"{learner}/{key:08x}/{number_of(incarnation):08d}" if key else f"{learner}/{incarnation:08d}"


def incarnation_key(learner: str, incarnation: int) -> str:
    return f"incarnation/{_below(learner, incarnation)}.json"


def claims_prefix(learner: str, key: int) -> str:
    return f"incarnation/{learner}/{key:08x}/" if key else f"incarnation/{learner}/"


def offer_key(learner: str, incarnation: int, seq: int) -> str:
    return f"offer/{_below(learner, incarnation)}/{seq:010d}.json"


def delta_key(learner: str, incarnation: int, seq: int, digest: str) -> str:
    return f"delta/{_below(learner, incarnation)}/{seq:010d}-{digest}"


def state_key(fragment: int, version: int, epoch: int, digest: str) -> str:
    return f"state/{fragment:04d}/{version:012d}-{epoch:010d}-{digest}"


def weights_key(fragment: int, version: int, epoch: int, digest: str) -> str:
    return f"weights/{fragment:04d}/{version:012d}-{epoch:010d}-{digest}"


def commit_key(n: int) -> str:
    return f"commit/{n:012d}.json"


def snapshot_key(n: int) -> str:
    return f"snapshot/{n:012d}.json"


def inner_key(learner: str, incarnation: int, step: int, digest: str) -> str:
    return f"inner/{_below(learner, incarnation)}/{step:012d}-{digest}"


def read_inner_key(key: str) -> tuple[str, int, int] | None:
    """(learner, incarnation, step of the optimizer), or None if it is no such key."""
    return _numbered(_INNER.fullmatch(key))


def read_commit_key(key: str) -> int | None:
    """The commit's number, or None if it is no such key."""
    found = _COMMIT.fullmatch(key)
    return None if found is None else int(found[1])


def read_snapshot_key(key: str) -> int | None:
    """The number of its commit, or None if it is no such key."""
    found = _SNAPSHOT.fullmatch(key)
    return None if found is None else int(found[1])


def read_version_key(key: str) -> tuple[int, int, int, str] | None:
    """(fragment, version, epoch, digest) of a state or of weights, or None if it is no such key."""
    found = _VERSION.fullmatch(key)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]), found[4])


def read_delta_key(key: str) -> tuple[str, int, int] | None:
    """(learner, incarnation, seq), or None if it is no such key."""
    return _numbered(_DELTA.fullmatch(key))


def read_offer_key(key: str) -> tuple[str, int, int] | None:
    """(learner, incarnation, seq), or None if it is no such key."""
    return _numbered(_OFFER.fullmatch(key))


def _numbered(found: re.Match[str] | None) -> tuple[str, int, int] | None:
    """What an object below a learner's incarnation is."""
    return None if found is None else (found[1], _incarnation(found), int(found[4]))


def _incarnation(found: re.Match[str]) -> int:
    return incarnation_of(int(found[3]), int(found[2] or "0", 16))


def read_claim_key(key: str) -> tuple[str, int] | None:
    """(learner, incarnation), or None if it is no such key."""
    found = _CLAIM.fullmatch(key)
    return None if found is None else (found[1], _incarnation(found))


def certificate_key(signer: str, public: str) -> str:
    """`signer`: role and name, as `learner/iowa`."""
    return f"{CERTIFICATES}{signer}/{public}.json"


def read_certificate_key(key: str) -> tuple[str, str] | None:
    """(learner, public key) of a learner's certificate, or None if it is no such key."""
    found = _CERTIFICATE.fullmatch(key)
    return None if found is None else (found[1], found[2])


def request_key(number: int) -> str:
    return f"request/{number:010d}.json"


def join_key(learner: str, epoch: int, number: int) -> str:
    return f"{JOINS}{learner}/{epoch:010d}-{number:04d}.json"


def read_join_key(key: str) -> tuple[str, int, int] | None:
    """(learner, epoch, number), or None if it is no such key."""
    found = _JOIN.fullmatch(key)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def event_key(unit: str, written_ms: int, nonce: str) -> str:
    """Of a batch of events. The number counts down, so that a listing shows the newest batches of a unit first."""
    return f"{EVENTS}{unit}/{LAST_MS - min(max(0, written_ms), LAST_MS):013d}-{nonce}.jsonl"


def read_event_key(key: str) -> tuple[str, int] | None:
    """(unit, when it was written by its writer's clock, in milliseconds), or None if it is no such key."""
    found = _EVENTS.fullmatch(key)
    return None if found is None else (found[1], LAST_MS - int(found[2]))


def heartbeat_key(unit: str) -> str:
    return f"heartbeat/{unit}.json"


def standby_heartbeat_key(name: str) -> str:
    return f"{STANDBY_HEARTBEATS}{name}.json"


def job_hint_key(unit: str) -> str:
    """Which cluster was last given this unit as a job, and by which machine."""
    return f"hint/job/{unit}.json"


def max_fragment_bytes(layout: Layout, fragment: int) -> int:
    """The largest delta, state or weights of this fragment; of an unknown fragment, the header alone."""
    if not 0 <= fragment < len(layout.fragments):
        return HEADER_BYTES
    known = layout.fragments[fragment]
    return HEADER_BYTES + BYTES_PER_PARAMETER * known.num_parameters + known.buffer_bytes


def max_moments_bytes(layout: Layout) -> int:
    """The largest saved inner state of a learner: two float32 moments of each parameter."""
    tensors = sum(len(fragment.tensors) for fragment in layout.fragments)
    header_bytes = MOMENTS_HEADER_BYTES + MOMENTS_HEADER_BYTES_PER_TENSOR * tensors
    return header_bytes + BYTES_PER_PARAMETER * layout.num_parameters
