"""Row 10: records are signed when keys are configured, bound to run, key and nonce. What forgers try, and what for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from diloco_cli.clock import monotonic_s, sleep_s
from diloco_cli.config.codec import replace, to_plain
from diloco_cli.config.settings import SyncerSettings
from diloco_cli.digests import digest
from diloco_cli.errors import RefusedError, UsageError
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.requests import ask
from diloco_cli.protocol.log.commit_log import append, fold, parse_format, read_format, read_log, snapshot_at, with_keys
from diloco_cli.protocol.log.keys import (
    FORMAT_KEY,
    commit_key,
    fingerprint,
    incarnation_of,
    offer_key,
    request_key,
    snapshot_key,
)
from diloco_cli.protocol.log.records import Request, RunFormat, encode
from diloco_cli.protocol.log.state import LearnerRecord, RunState
from diloco_cli.runtime.consent import signing_secret, write_key
from diloco_cli.runtime.daemon import SystemClock, perform
from diloco_cli.runtime.units import keys_of, signers_on
from diloco_cli.signing import LOG, LONG_BYTES, OPERATOR, UNSIGNED, Secret, SignatureError, learner_signer, unpacked
from diloco_cli.store.memory import MemoryStore
from tests.security.signed import (
    HOST,
    SECRET,
    SignedFleet,
    as_learner,
    as_reader,
    as_syncer,
    key_for,
    key_of,
    private_key,
    signed_run,
)
from tests.security.test_strangers import poll
from tests.simulation.operated import asked, done, frequent_snapshots, state_of
from tests.simulation.toy import ToyFleet, make_run
from tests.unit.protocol.records import RUN as TOY
from tests.unit.protocol.records import commit, genesis, offer

__all__ = ["frequent_snapshots"]
RUN = signed_run(TOY)
OTHER_RUN = signed_run(replace(TOY, run_id="another"))
L0, L1 = as_learner(RUN, "l0"), as_learner(RUN, "l1")
FIRST = incarnation_of(1, fingerprint(L0.keyring.public("learner/l0")))
AT = offer_key("l0", FIRST, 0)
OFFER = replace(offer(genesis()), incarnation=FIRST, payload_digest=digest(b""))
ZEROS = b"0" * 64 + b":" + b"0" * 128 + b":" + b"0" * 128
Sealed = Callable[[], bytes]


def signed(run: RunFormat, signer: str, key: str, record: object) -> bytes:
    return run.keyring.sign(signer, key, encode(record))


def relabelled(data: bytes, signer: str = "learner/l0") -> bytes:
    """The record with another signer's name before the same key and certificate."""
    return re.sub(rb'"signature":"[a-z0-9/]+:', f'"signature":"{signer}:'.encode(), data)


def self_certified(signer: str) -> RunFormat:
    """The run as a forger opens it that certifies its own key."""
    forger = Secret("a forger's secret, 32 letters or more", "TEST")
    own = Secret(forger.certified(RUN.run_id, {signer: private_key("forger")}), "TEST")
    return replace(RUN, keyring=own.keyring(RUN.run_id))


FORMAT = signed(RUN, OPERATOR, FORMAT_KEY, RUN)
SYNCER = as_syncer(RUN)


@pytest.mark.usefixtures("frequent_snapshots")
def test_in_a_signed_run_every_record_has_the_signature_of_whoever_must_have_written_it() -> None:
    """And it ends as the unsigned run does: signing decides nothing else."""
    plain, fleet = ToyFleet(make_run(merges=8)).start(), SignedFleet(signed_run()).start()
    plain.finish()
    fleet.finish()
    assert plain.errors() == fleet.errors() == []
    store, run = fleet.world.store, fleet.run
    counted = dict.fromkeys(("commit", "snapshot", "epoch", "incarnation", "offer"), 0)
    for key in store.list("", limit=10_000):
        kind, *rest = key.split("/")
        if kind in counted:
            signer = learner_signer(rest[0]) if kind in ("incarnation", "offer") else LOG
            data = store.get(key) or b""
            assert run.keyring.authenticates(signer, key, data), key
            assert json.loads(data)["signature"].startswith(f"{HOST if signer == LOG else signer}:")
            counted[kind] += 1
    assert min(counted.values()) >= 1 and counted["offer"] >= 8
    assert set(plain.kinds()) == set(fleet.kinds())
    assert all(b'"signature"' not in (plain.world.store.get(key) or b"") for key in plain.world.store.list("offer/"))


@pytest.mark.parametrize(
    ("forged", "counts"),
    [
        (lambda: signed(L0, "learner/l0", AT, OFFER), True),
        (lambda: encode(OFFER), False),
        (lambda: signed(L1, "learner/l1", AT, OFFER), False),
        (lambda: signed(SYNCER, LOG, AT, OFFER), False),
        (lambda: relabelled(signed(L1, "learner/l1", AT, OFFER)), False),
        (lambda: signed(self_certified("learner/l0"), "learner/l0", AT, OFFER), False),
        (lambda: signed(L0, "learner/l0", offer_key("l0", FIRST, 1), OFFER), False),
        (lambda: signed(as_learner(OTHER_RUN, "l0"), "learner/l0", AT, OFFER), False),
        (lambda: signed(L0, "learner/l0", AT, OFFER).replace(b'"tokens":8', b'"tokens":9'), False),
        (lambda: signed(L0, "learner/l0", AT, OFFER)[:-1] + b" }", False),
        (lambda: encode(OFFER)[:-1] + b',"signature":"learner/l0:' + ZEROS + b'"}', False),
    ],
    ids=[
        "own", "none", "another's", "the log's", "another's in its name", "certified by itself", "of another key",
        "of another run", "changed", "shifted", "zeros",
    ],
)  # fmt: skip
def test_an_offer_counts_only_with_its_own_learners_signature(forged: Sealed, counts: bool) -> None:
    store, inbox = MemoryStore(), Inbox(RUN)
    inbox.open(structs.replace(genesis(RUN), learners={"l0": LearnerRecord(floor=FIRST)}), 0.0)
    store.create(AT, forged())
    poll(store, inbox)
    assert inbox.outcomes == [] and sum(len(box.pending) for box in inbox.mailboxes.values()) == counts
    assert inbox.heard_s["l0"] == (1.0 if counts else 0.0), "a forgery is nobody's sign of life"


@pytest.mark.parametrize(
    "forged",
    [
        encode,
        lambda record: signed(L0, "learner/l0", commit_key(0), record),
        lambda record: signed(SYNCER, LOG, commit_key(1), record),
        lambda record: relabelled(signed(L0, "learner/l0", commit_key(0), record), HOST),
        lambda record: relabelled(signed(L0, "learner/l0", commit_key(0), record), "operator"),
        lambda record: signed(as_syncer(OTHER_RUN), LOG, commit_key(0), record),
    ],
    ids=["unsigned", "a learner's", "of another key", "a learner's as a syncer", "as the operator", "of another run"],
)
def test_a_commit_that_no_syncer_signed_is_refused_by_everybody(forged: Callable[[object], bytes]) -> None:
    record = commit(RunState(), "epoch_start", outputs=genesis(RUN).outputs)
    for run in (RUN, L0):
        with pytest.raises(SignatureError, match="not signed"):
            fold(run, RunState(), forged(record))
        assert fold(run, RunState(), signed(SYNCER, LOG, commit_key(0), record)).n == 0


def test_who_holds_no_key_reads_and_checks_a_signed_log_and_cannot_write_it() -> None:
    keyless = as_reader(RUN)
    record = commit(RunState(), "epoch_start", outputs=genesis(RUN).outputs)
    assert fold(keyless, RunState(), signed(SYNCER, LOG, commit_key(0), record)).n == 0
    with pytest.raises(SignatureError):
        fold(keyless, RunState(), encode(record))
    for reader in (keyless, L0):
        with pytest.raises(RefusedError):
            next(append(reader, RunState(), record))


@pytest.mark.usefixtures("frequent_snapshots")
def test_a_forged_snapshot_is_passed_over() -> None:
    """A snapshot's state is believed, not recomputed: without a signature whoever may write one rewrites the run."""
    fleet = SignedFleet(signed_run()).start().until_commits(9)
    store, key = fleet.world.store, snapshot_key(5)
    true = store.get(key) or b""
    forged = true.replace(b'"phase":"RUNNING"', b'"phase":"FINISHED"')
    assert forged != true
    store.delete(key)
    store.create(key, forged)

    def read(run: RunFormat) -> RunState | None:
        found: RunState | None = done(fleet, fleet.world.start("reader", snapshot_at(run, 5))).result
        return found

    assert read(fleet.run) is None and read(as_reader(fleet.run)) is None and state_of(fleet).phase == "RUNNING"
    unaware = read(replace(fleet.run, keyring=UNSIGNED))
    assert unaware is not None and unaware.phase == "FINISHED"


def test_only_an_operator_stops_a_run() -> None:
    fleet = SignedFleet(signed_run(make_run(merges=20))).start().until_commits(4)
    as_l0 = as_learner(fleet.run, "l0")
    with pytest.raises(RefusedError, match="operator"):
        done(fleet, fleet.world.start("l0", ask(state_of(fleet), "stop", "n", "then", keyring=as_l0.keyring)))
    for number, (writer, signer) in enumerate(((as_l0, "learner/l0"), (as_syncer(fleet.run), LOG))):
        key = request_key(number)
        fleet.world.store.create(key, signed(writer, signer, key, Request(number, "stop", "n", "then")))
    fleet.until_commits(12)
    assert (state_of(fleet).phase, state_of(fleet).next_request) == ("RUNNING", 0), "the log hears nothing of it"
    assert asked(fleet, "stop").result == 2, "behind the objects that are no requests"
    fleet.finish()
    assert state_of(fleet).phase == "STOPPED"


# -- keys -----------------------------------------------------------------------------------------------------------


def test_a_key_signs_as_its_own_signer_and_certifies_nobody() -> None:
    for run, own in ((L0, "learner/l0"), (SYNCER, LOG), (RUN, OPERATOR)):
        for role in {"learner/l0", "learner/l1", OPERATOR, LOG} - {own} - ({LOG} if run is RUN else set()):
            with pytest.raises(RefusedError):
                run.keyring.sign(role, AT, encode(OFFER))
            assert not run.keyring.holds(role)
        assert run.keyring.holds(own)
    handed = Secret(key_of("a", "l0"), "TEST")
    for asks in (handed.signing, lambda: handed.certificate("a", "learner/l1", "b" * 64)):
        with pytest.raises(UsageError):
            asks()


VARIABLE = "DILOCO_SIGNING_KEY"


def privates_of(text: str) -> list[str]:
    """The private keys in the text of keys that were handed over."""
    return [key.split(":")[1] for key in text.removeprefix("certified:").split(",")[1:]]


def test_a_syncers_key_signs_the_log_and_checks_all_learners() -> None:
    record = commit(RunState(), "epoch_start", outputs=genesis(RUN).outputs)
    assert fold(L0, RunState(), signed(SYNCER, LOG, commit_key(0), record)).n == 0
    l9 = as_learner(RUN, "l9")
    at = offer_key("l9", incarnation_of(1, fingerprint(l9.keyring.public("learner/l9"))), 0)
    assert SYNCER.keyring.authenticates("learner/l9", at, signed(l9, "learner/l9", at, OFFER))


def test_a_record_is_signed_as_documented() -> None:
    """With Ed25519 by hand, with no help from the module that uses it."""
    import hmac

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def by_hand(text: bytes) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hmac.new(secret, text, "sha256").digest())

    secret = b"0123456789abcdef0123456789abcdef"
    operator, own = by_hand(b"diloco operator"), by_hand(b"any")
    public = own.public_key().public_bytes_raw().hex()
    certificate = operator.sign(b"diloco certificate\0id\0learner/l0\0" + public.encode()).hex()
    code = own.sign(b'diloco record\0id\0learner/l0\0offer/x\0{"nonce":"n"}').hex()
    text = Secret(secret.decode(), "TEST").certified("id", {"learner/l0": own.private_bytes_raw().hex()})
    signed_by_it = Secret(text, "TEST").keyring("id").sign("learner/l0", "offer/x", b'{"nonce":"n"}')
    assert signed_by_it == f'{{"nonce":"n","signature":"learner/l0:{public}:{certificate}:{code}"}}'.encode()
    body = b'{"nonce":"%b"}' % (b"n" * LONG_BYTES)
    code = own.sign(b"diloco digest\0id\0learner/l0\0offer/x\0" + digest(body).encode()).hex()
    long = Secret(text, "TEST").keyring("id").sign("learner/l0", "offer/x", body)
    assert unpacked(long).endswith(f':{code}"}}'.encode())


@pytest.mark.parametrize("length", [100, LONG_BYTES - 12, LONG_BYTES, 3 * LONG_BYTES])
def test_a_change_anywhere_in_a_record_of_any_length_is_seen(length: int) -> None:
    key, body = commit_key(7), b'{"nonce":"%b"}' % (b"n" * length)
    data = unpacked(SYNCER.keyring.sign(LOG, key, body))
    assert RUN.keyring.authenticates(LOG, key, data)
    for place in (11, len(body) // 2, len(body) - 3):
        assert not RUN.keyring.authenticates(LOG, key, data[:place] + b"x" + data[place + 1 :])


def open_format(data: bytes, secret: Secret | None, *signs_as: str) -> RunFormat:
    bucket = MemoryStore()
    bucket.create(FORMAT_KEY, data)
    return perform(read_format("u", secret, signs_as), bucket, SystemClock(monotonic_s, sleep_s, lambda: None))


def test_the_format_names_the_operators_public_key_and_holds_no_other() -> None:
    data = FORMAT
    signing = json.loads(data)["signing"]
    assert signing == {"algorithm": "ed25519", "operator": L0.keyring.operator}
    assert privates_of(key_of(RUN.run_id, "l0"))[0].encode() not in data
    assert "keyring" not in to_plain(RUN) and "32 letters" not in repr(RUN) + repr(SECRET) + repr(RUN.keyring)
    assert open_format(data, SECRET, OPERATOR) == RUN
    assert open_format(data, Secret(key_of(RUN.run_id, "l0"), "T"), "learner/l0").keyring.holds("learner/l0")
    assert not open_format(data, None).keyring.holds(LOG)
    hostile = json.loads(encode(RUN)) | {"keyring": {"secret": "mine"}}
    assert not parse_format(RUN.keyring.sign(OPERATOR, FORMAT_KEY, encode(hostile)), "u").keyring.holds(LOG)


@pytest.mark.parametrize(
    ("data", "secret", "signs_as", "reason"),
    [
        (FORMAT, None, (LOG,), "no key for log"),
        (FORMAT, "the run's own secret, 32 letters or more", (LOG,), "signs no merges"),
        (FORMAT, key_of(RUN.run_id, "l0"), (LOG,), "no key for log"),
        (FORMAT, key_of(RUN.run_id, "l1"), ("learner/l0",), "no key for learner/l0"),
        (FORMAT, key_of("another", "l0"), (), "not the one"),
        (FORMAT, "x" * 40, (), "not the one"),
        (encode(TOY), "x" * 40, (LOG,), "not signed"),
    ],
    ids=[
        "no key",
        "the operator's",
        "a learner as syncer",
        "another's key",
        "another run's key",
        "another secret",
        "switched off",
    ],
)
def test_a_daemon_whose_key_does_not_fit_its_run_does_not_start(
    data: bytes, secret: str | None, signs_as: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        open_format(data, None if secret is None else Secret(secret, "T"), *signs_as)


def test_only_the_operator_signs_a_format() -> None:
    """A learner or a syncer that signs another one anew convinces nobody, with a key or without."""
    for run, role in ((L0, "learner/l0"), (SYNCER, LOG)):
        with pytest.raises(SignatureError):
            parse_format(run.keyring.sign(role, FORMAT_KEY, encode(RUN)), "u")


def test_a_format_that_a_stranger_changed_is_refused() -> None:
    data = FORMAT.replace(b'"name":"toy"', b'"name":"tox"')
    with pytest.raises(SignatureError):
        parse_format(data, "u")


def test_a_format_that_a_stranger_signed_anew_is_refused_by_whoever_holds_a_key() -> None:
    """Without one the operator that FORMAT.json names is believed."""
    stranger = Secret("a stranger's secret, 32 letters or more", "TEST")
    forged = replace(TOY, checksums=False, signing=stranger.signing())
    data = stranger.keyring(TOY.run_id).sign(OPERATOR, FORMAT_KEY, encode(forged))
    for text in (key_of(RUN.run_id, "l0"), key_for(RUN.run_id, HOST)):
        with pytest.raises(UsageError, match="not the one"):
            with_keys(parse_format(data, "u"), Secret(text, "TEST"), "u")
    assert open_format(data, None).signing == forged.signing


@pytest.mark.parametrize(
    "text",
    [
        "short",
        "x" * 31,
        "x" * 5000,
        "x" * 40 + "\n\x1b[2J",
        "certified:" + "a" * 64,
        "certified:l0:x",
        "machine:" + "a" * 64,
        f"machine:{'a' * 64},{'b' * 64},boss/x",
    ],
)
def test_what_is_no_key_is_refused_and_never_quoted(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Secret(text, "DILOCO_SIGNING_KEY")
    assert text not in f"{refused.value} {refused.value.hint}"


def test_a_key_file_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    write_key(path, "y" * 40)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="already"):
        write_key(path, "z" * 40)
    monkeypatch.delenv("DILOCO_SIGNING_KEY", raising=False)
    assert signing_secret() is None
    monkeypatch.setenv("DILOCO_SIGNING_KEY_FILE", str(path))
    found = signing_secret()
    assert found is not None and found.keyring("id").operator == Secret("y" * 40, "T").keyring("id").operator
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others than its owner"):
        signing_secret()
    path.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        signing_secret()


def test_a_launched_learner_gets_its_own_key_in_place_of_the_operators_secret() -> None:
    plain, handed = (Secret(keys_of(RUN, signers_on(RUN, "l0"), SECRET)[VARIABLE], "TEST") for _ in range(2))
    assert plain.keyring(RUN.run_id).public("learner/l0") != handed.keyring(RUN.run_id).public("learner/l0")
    assert not plain.keyring(RUN.run_id).holds(LOG) and not plain.is_operators
    hosting = replace(RUN, settings=replace(RUN.settings, syncer=SyncerSettings(on_learners=True)))
    ring = Secret(keys_of(hosting, signers_on(hosting, "l0"), SECRET)[VARIABLE], "TEST").keyring(RUN.run_id)
    assert ring.holds("learner/l0") and ring.holds(LOG) and not ring.holds(OPERATOR), "its standby signs the log"
    own = signers_on(RUN, "l0")
    assert keys_of(TOY, own, SECRET) == keys_of(RUN, own, None) == keys_of(RUN, own, handed) == {}


def test_a_log_whose_middle_was_replaced_ends_a_reader() -> None:
    """The hash chain is over the signed bytes: a replaced signature breaks it also for those who hold no key."""
    fleet = SignedFleet(signed_run()).start().until_commits(7)
    store, key = fleet.world.store, commit_key(2)
    data = store.get(key) or b""
    store.delete(key)
    store.create(key, data[:-3] + (b"0" if data[-3:-2] != b"0" else b"1") + b'"}')
    from diloco_cli.errors import DataCheckError

    for run, kind in ((fleet.run, SignatureError), (replace(fleet.run, keyring=UNSIGNED), DataCheckError)):
        with pytest.raises(kind):
            done(fleet, fleet.world.start("reader", read_log(run, RunState(phase="RUNNING"))))
