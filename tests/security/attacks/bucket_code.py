"""Code that the bucket names: FORMAT.json is replaced by one whose model is a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from diloco_cli.protocol.log.commit_log import read_format
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.runtime.daemon import perform
from diloco_cli.signing import KEY_FILE_VARIABLE, OPERATOR, Checksummed, Keyring, Secret, body_of
from tests.security.attacks.stage import AttackedRun, AttackSeen, running, until
from tests.studies.launched import CLOCK

ENDED_WITHIN_S = 30.0
OTHER_OPERATOR = Secret("the secret of an operator that nobody has chosen", "the attacker")
Reseal = Callable[[AttackedRun, bytes], bytes]


def unsigned_run(directory: Path) -> AttackSeen:
    """Whoever may write FORMAT.json of a run without signatures, against every process that is started by a URL."""
    victims = {
        "learner": ("learner", "--run", "URL", "--name", "l0"), "syncer": ("syncer", "URL"),
        "resume": ("resume", "URL"), "evaluator": ("evaluator", "--run", "URL"),
    }  # fmt: skip
    with running(AttackedRun(directory)) as stage:
        return _attacked(
            stage, lambda stage, body: Checksummed(stage.run.run_id).sign(OPERATOR, FORMAT_KEY, body), victims
        )


def signed_by_a_learner(directory: Path) -> AttackSeen:
    """Signed run. l1's key, against l0 with a key of its own: as the operator, with l1's certificate."""
    return _against_a_key(directory, _as_operator)


def signed_by_another_operator(directory: Path) -> AttackSeen:
    return _against_a_key(directory, _of_another_operator)


def no_longer_signed(directory: Path) -> AttackSeen:
    return _against_a_key(directory, _unsigned)


def _against_a_key(directory: Path, reseal: Reseal) -> AttackSeen:
    with running(AttackedRun(directory, signed=True)) as stage:
        for name in ("l0", "l1"):
            made = stage.diloco("key", "request", stage.url, "learner", name, f"{name}.key", keyless=True)
            done = stage.diloco("key", "certify", stage.url, "learner", name, made.stdout.strip())
            assert done.returncode == 0, made.stderr + done.stderr
        return _attacked(stage, reseal, {"learner": ("learner", "--run", "URL", "--name", "l0")}, directory / "l0.key")


def _attacked(
    stage: AttackedRun, reseal: Reseal, victims: dict[str, tuple[str, ...]], key: Path | None = None
) -> AttackSeen:
    path, marks = stage.bucket / FORMAT_KEY, stage.directory / "marks"
    honest = path.read_bytes()
    ran, ends = [], []
    stage.kill()
    super(AttackedRun, stage).end()
    marks.mkdir()
    for name, words in victims.items():
        mark = marks / name
        plain = json.loads(body_of(honest))
        plain["settings"]["model"] = {"entrypoint": "os:system", "args": {"command": f"touch {mark}"}}
        body = json.dumps(plain, separators=(",", ":"), sort_keys=True).encode()
        path.write_bytes(honest)  # what reseal reads
        path.write_bytes(reseal(stage, body))
        more = {} if key is None else {KEY_FILE_VARIABLE: str(key)}
        child = stage.process(
            *(stage.url if word == "URL" else word for word in words), environment=stage.elsewhere(name, **more)
        )
        until(lambda child=child, mark=mark: child.poll() is not None or mark.exists(), ENDED_WITHIN_S)
        child.kill()
        child.wait()
        ran += [name] if mark.exists() else []
        ends.append(f"{name} {child.returncode}")
    return AttackSeen(not ran, f"the command ran on: {', '.join(ran) or 'none'} ({', '.join(ends)})")


def _as_operator(stage: AttackedRun, body: bytes) -> bytes:
    """Signed with l1's private key, and with its certificate."""
    secret = Secret((stage.directory / "l1.key").read_text().strip(), "l1")
    ring = perform(read_format(stage.url, secret), stage.store, CLOCK).keyring
    assert isinstance(ring, Keyring)
    return Keyring(ring.run_id, ring.operator, {OPERATOR: ring.grants["learner/l1"]}).sign(OPERATOR, FORMAT_KEY, body)


def _of_another_operator(stage: AttackedRun, body: bytes) -> bytes:
    plain, ring = json.loads(body), OTHER_OPERATOR.keyring(stage.run.run_id)
    plain["signing"]["operator"] = ring.operator
    return ring.sign(OPERATOR, FORMAT_KEY, json.dumps(plain, separators=(",", ":"), sort_keys=True).encode())


def _checksummed(stage: AttackedRun, body: bytes) -> bytes:
    return Checksummed(stage.run.run_id).sign(OPERATOR, FORMAT_KEY, body)


def _unsigned(stage: AttackedRun, body: bytes) -> bytes:
    plain = json.loads(body) | {"checksums": True}
    plain.pop("signing")
    bare = json.dumps(plain, separators=(",", ":"), sort_keys=True).encode()
    return Checksummed(stage.run.run_id).sign(OPERATOR, FORMAT_KEY, bare)
