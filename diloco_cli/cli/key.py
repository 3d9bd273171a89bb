"""`diloco key`: the keys of a signed run; `diloco bucket-policy`: what each role may do in its bucket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, cast, get_args

import typer

from diloco_cli.cli.arguments import (
    AllowStore,
    JsonOption,
    OpenRun,
    TimeoutOption,
    find_run,
    foreground_store,
    head_of,
    named_here,
    open_run,
    operator_of,
)
from diloco_cli.cli.operators import open_unfinished
from diloco_cli.cli.output import print_json, talk
from diloco_cli.errors import DataCheckError, RefusedError, UsageError
from diloco_cli.paths import checked_name, templates_directory
from diloco_cli.protocol.log.keys import CERTIFICATES, fingerprint
from diloco_cli.protocol.log.records import MAX_RECORD_BYTES
from diloco_cli.randomness import new_private_key
from diloco_cli.signing import (
    KEY_FILE_VARIABLE,
    KEY_HINT,
    Secret,
    is_public_key,
    machine_text,
    public_key,
    short_key,
    syncer_signer,
)
from diloco_cli.store.port import Created, all_keys
from diloco_cli.store.url import parse_url

Role = Literal["learner", "syncer"]
FILE_HELP = "Where to write it, readable by its owner alone. The key itself is never shown."
FileArgument = typer.Argument(..., metavar="FILE", help=FILE_HELP)
RunArgument = typer.Argument(..., metavar="RUN", help="A run's name, its run file, or its bucket URL.")
RoleArgument = typer.Argument(..., metavar="ROLE", help="What it signs as: learner or syncer.")
NameArgument = typer.Argument(
    ..., metavar="NAME", help="Of the learner, also if it has not joined yet, or the machine."
)
key = typer.Typer(help="Keys with which records are signed.", no_args_is_help=True, rich_markup_mode=None)


@key.command("new")
def new(file: Path = FileArgument) -> None:
    """Make an operator's secret, for one or more runs. It stays on this machine."""
    from diloco_cli.runtime.consent import write_key

    text = new_private_key()
    write_key(file, text)
    print(file)
    talk(f"the operator's public key begins with {short_key(Secret(text, str(file)).operator)}")
    talk(f"next: {KEY_FILE_VARIABLE}={file.absolute()} diloco launch RUN.yaml")


@key.command("request")
def request(
    run: str = RunArgument, role: Role = RoleArgument, name: str = NameArgument, file: Path = FileArgument
) -> None:
    """Make this machine's own key for a signed run; prints its public half, which the operator certifies."""
    from diloco_cli.runtime.consent import write_key

    opened = signed_run(run)
    assert opened.format.signing is not None
    operator, private = opened.format.signing.operator, new_private_key()
    write_key(file, machine_text(operator, private, signers_of(opened, role, name)))
    print(public_key(private))
    talk(f"{file} trusts the operator's key {short_key(operator)}: let the operator confirm it")
    words = f"diloco key certify {opened.url} {role} {name} {public_key(private)}"
    talk(f"next, on the operator's machine: {KEY_FILE_VARIABLE}=OPERATORS_FILE {words}")
    talk(f"then, here: {KEY_FILE_VARIABLE}={file.absolute()} {start_of(opened, role, name)}")


@key.command("certify")
def certify(
    run: str = RunArgument,
    role: Role = RoleArgument,
    name: str = NameArgument,
    public: str = typer.Argument(..., metavar="PUBLICKEY", help="As `diloco key request` printed it there."),
    allow_store: list[str] = AllowStore,
) -> None:
    """Certify a machine's key for a role and a name in a run, with the operator's secret in the environment."""
    from diloco_cli.protocol.log.claims import certificate_record
    from diloco_cli.runtime.consent import consented, signing_secret

    opened, secret = signed_run(run), signing_secret()
    if secret is None or not secret.is_operators:
        raise UsageError("keys are certified with the operator's secret, which is not there", hint=KEY_HINT)
    if not is_public_key(public):
        raise UsageError(f"{public[:64]!a} is no public key (64 hexadecimal digits)", hint="diloco key request, there")
    signers, regions = signers_of(opened, role, name), opened.format.region_urls
    others = certified_keys(opened, name).keys() - {public}
    if twin := next((other for other in others if fingerprint(other) == fingerprint(public)), None):
        what = f"the key {short_key(public)} begins like {short_key(twin)}, which is certified for {name}"
        raise RefusedError(f"{what}: they would write to the same places", hint="make another one: diloco key request")
    consented(opened.format, opened.url, named_here([], allow_store), regions, code=False)
    full = _no_place_left(opened, name) if role == "learner" else ""
    for store in [opened.store, *(foreground_store(url) for url in regions)]:
        for signer in signers:
            where, record = certificate_record(opened.format.run_id, secret, signer, public)
            answer = store.create(where, record)
            if not isinstance(answer, Created) and answer.data != record:
                raise DataCheckError("this is not the certificate", where=f"{store.url}/{where}", hint="remove it")
    if len(signers) > 1:
        talk(f"{name} hosts a standby syncer, so its owner is trusted with the log")
    print(f"run {opened.name}: {public} is certified as {' and '.join(signers)}")
    talk(full or f"next, on that machine: {KEY_FILE_VARIABLE}=ITS_FILE {start_of(opened, role, name)}")


@key.command("revoke")
def revoke(
    run: str = RunArgument,
    which: str = typer.Argument(..., metavar="NAME|PUBLICKEY", help="A name with all its certified keys, or one key."),
    timeout_s: float | None = TimeoutOption,
    as_json: bool = JsonOption,
) -> None:
    """Revoke a key: from one commit on, nothing that it signs counts. What was merged stays; a process that works with
    it ends with an error."""
    opened, state = open_unfinished(run, "revoke")
    named = certified_keys(opened, which) or ({which: None} if is_public_key(which) else {})
    keys = [public for public in named if public not in state.revoked]
    if not keys:
        raise UsageError(f"{which!a} names no certified key of run {opened.name} that still counts")
    for public in keys:
        state = operator_of(opened, timeout_s).request("revoke", "diloco key revoke", key=public, learner=named[public])
    if as_json:
        print_json("key revoke", {"run": opened.name, "keys": keys, "commit": state.n})
    else:
        print(f"run {opened.name}: {' and '.join(keys)} revoked, as of commit {state.n}")
        talk("take that machine's credentials for the bucket away, too")


def signed_run(run: str) -> OpenRun:
    opened = open_run(run, at_home=False)
    if opened.format.signing is None:
        raise UsageError(f"run {opened.name} is not signed: it has no keys", where=opened.url)
    return opened


def signers_of(opened: OpenRun, role: Role, name: str) -> tuple[str, ...]:
    """As whom such a machine signs in this run."""
    from diloco_cli.runtime.units import signers_on

    checked_name(name, f"the name of a {role}")
    return signers_on(opened.format, name) if role == "learner" else (syncer_signer(name),)


def start_of(opened: OpenRun, role: Role, name: str) -> str:
    """The command that starts such a process."""
    if role == "syncer":
        return f"diloco syncer --standby --run {opened.url}"
    joins = "" if opened.format.island(name) is not None else " --join"
    return f"diloco learner --run {opened.url} --name {name}{joins}"


def _no_place_left(opened: OpenRun, name: str) -> str:
    """Why a learner that has yet to join cannot: it needs a data shard that no other has. Empty if it can."""
    known = head_of(opened).with_members(opened.format)
    if known.island(name) is not None or len(known.all_islands) < known.num_shards:
        return ""
    taken = f"the run's {known.num_shards} data shards are taken, and their number never changes"
    return f"but {name} cannot join: {taken}; for more islands, launch a run with a higher data.shards"


def certified_keys(opened: OpenRun, which: str) -> dict[str, str | None]:
    """The public keys that were certified for this name, or this one key, by the certificates in the bucket; each with
    the learner whose it is (None: a syncer's)."""
    from diloco_cli.protocol.log.claims import certificate_in

    found: dict[str, str | None] = {}
    for key in all_keys(opened.store, CERTIFICATES):
        data = opened.store.get(key, MAX_RECORD_BYTES) if which in key else None
        certificate = None if data is None else certificate_in(opened.format.keyring, key, data)
        if certificate is None:  # any process that may write there could name any key
            continue
        role, _, name = certificate.signer.partition("/")
        if which in (name, certificate.public) and (role == "learner" or certificate.public not in found):
            found[certificate.public] = name if role == "learner" else None
    return found


PolicyRole = Literal["learner", "syncer", "operator", "reader"]
_PLACE = re.compile(r"[A-Za-z0-9._/-]+")
_PRINCIPAL = re.compile(r"[A-Za-z0-9._:/@-]+")
_PLACEHOLDER = re.compile(r"@[A-Z]+@")


def bucket_policy(
    run: str = typer.Argument(..., metavar="RUN", help="The run's bucket URL (it need not exist yet), or its name."),
    role: str = typer.Argument(..., metavar="ROLE", help="learner, syncer, operator or reader."),
    name: str = typer.Option("", "--name", help="The learner that the policy is for."),
    project: str = typer.Option("", "--project", help="gs://: the project that has the custom roles."),
    member: str = typer.Option("", "--member", help="gs://: who gets the role, such as serviceAccount:NAME."),
) -> None:
    """Print what a role may do in a run's bucket, as a policy for the cloud."""
    if role not in get_args(PolicyRole):
        raise UsageError(f"no role {role!a}; there are: {', '.join(get_args(PolicyRole))}")
    print(policy_of(find_run(run).url, cast(PolicyRole, role), name, project, member), end="")


def policy_of(url: str, role: PolicyRole, learner: str = "", project: str = "", member: str = "") -> str:
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
