"""The one independent checker of a log: each commit against the facts of all commits before it.

`diloco verify` and the simulated histories (`tests/histories/`) feed it commit by commit, and compute the merges
themselves. It keeps its own books, has its own rules of what a commit brings and who may make it, and never reads the
folded state of the daemons (`protocol/log/state.py`), so an error in their code shows here. How norms are judged, what
proves a speed, and what is a jump of the loss, are the product's own rules, applied to these books.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import isclose

from msgspec import structs

from diloco_cli.protocol.actors.membership import contradiction_of_member
from diloco_cli.protocol.log.commits import (
    CollectionFloor,
    Commit,
    EpochStart,
    Evaluation,
    Finish,
    Membership,
    Merge,
    Quarantine,
    Readmit,
    Revoke,
    Rollback,
    Skip,
    Stop,
)
from diloco_cli.protocol.log.health import (
    NOTHING,
    Norms,
    Stability,
    are_too_many,
    bad_in_a_row,
    is_bad,
)
from diloco_cli.protocol.log.keys import fingerprint, key_of
from diloco_cli.protocol.log.records import (
    MAX_EXACT,
    FragmentVersion,
    MergedOffer,
    Offer,
    Outcome,
    RunFormat,
    fragment_of_slot,
)
from diloco_cli.protocol.log.state import LearnerRecord
from diloco_cli.protocol.rules.belief import proven
from diloco_cli.protocol.rules.divergence import jump_of
from diloco_cli.protocol.rules.merging import JudgedDelta, judge, max_steps, offered_weight
from diloco_cli.signing import OPERATOR, Signature

APPLIED, REFUSED = 1, 2
PAGE = 256
Expect = Callable[[bool, str, str], None]  # (whether it holds, the rule of ARCHITECTURE.md, what is wrong)


class Checker:
    """The facts from earlier commits. For each commit call `check`, then `settle`. `expect(holds, rule, otherwise)` is
    called for each rule. `offer_outcomes`: APPLIED, REFUSED, or (in a wrong log) both, in a byte an offer: a run of a
    month has millions. Those of PAGE numbers of one incarnation lie together."""

    def __init__(self, run: RunFormat, expect: Expect) -> None:
        self.run, self.expect = run, expect
        self.versions: dict[int, list[FragmentVersion]] = {}
        self.offer_outcomes: dict[tuple[str, int, int], bytearray] = defaultdict(lambda: bytearray(PAGE))
        self.bases: dict[tuple[str, int], set[int]] = {}
        self.ranges: dict[tuple[str, int], int] = {}
        self.floors: dict[str, int] = defaultdict(int)
        self.slot = 0
        self.epoch = 0
        self.duplicates = 0
        self.finished = self.stopped = False
        self.base_floor = self.gc_floor = self.next_request = 0
        self.bad_in_a_row: dict[str, int] = {}
        self.kept_out: set[str] = set()
        self.revoked: set[str] = set()
        self.epoch_key = ""
        self.norms: Norms = {}
        self.proven: dict[str, LearnerRecord] = {}  # their speeds and merges, and what is doubted, alone
        self.shares: dict[str, int] = {}
        self.shares_after: dict[int, dict[str, int]] = {}
        self.stability = Stability()

    @property
    def token_parameters(self) -> int:
        """Sum of tokens x parameters of the fragment, over the offers that count."""
        return sum(self.shares.values())

    @property
    def _parameters_due(self) -> int:
        """Of the fragment whose slot is due."""
        return self.run.layout.fragments[fragment_of_slot(self.slot, self.run.num_fragments)].num_parameters

    @property
    def tokens(self) -> int:
        return self.token_parameters // self.run.layout.num_parameters

    def check(self, commit: Commit, key: str) -> bool:
        """Check every rule that the log alone shows; False if this commit's outputs or inputs cannot be right."""
        self._check_order(commit, key)
        self._check_kind(commit, key)
        sound = self._check_outputs(commit, key)
        if isinstance(commit, Merge):
            self._check_merge(commit, key)
            fragment = fragment_of_slot(self.slot, self.run.num_fragments)
            possible = [self._check_input(item, fragment, key) for item in commit.inputs] if sound else []
            sound = sound and all(possible)
            self._check_judgement(commit, key)
            self._check_speeds(commit, key)
        self._check_outcomes(commit, key)
        return sound

    def _check_order(self, commit: Commit, key: str) -> None:
        """Checks epochs, slots, requests and the end of the run."""
        self.expect(not self.finished, "1", f"{key}: a {commit.kind} after the run had finished")
        held = self.stopped and not isinstance(commit, EpochStart)
        self.expect(not held, "1", f"{key}: a {commit.kind} while the run was stopped")
        self.stopped = isinstance(commit, Stop)
        follows = commit.epoch > self.epoch if isinstance(commit, EpochStart) else commit.epoch == self.epoch
        self.expect(follows, "1", f"{key}: a {commit.kind} of epoch {commit.epoch} after epoch {self.epoch}")
        self.epoch = commit.epoch
        self.finished = self.finished or isinstance(commit, Finish)
        if isinstance(commit, Merge | Skip):
            self.expect(commit.slot == self.slot, "1", f"{key}: slot {commit.slot} where {self.slot} was due")
        if commit.request is not None:
            first = commit.request >= self.next_request
            self.expect(first, "1", f"{key}: request {commit.request} is answered a second time")

    def check_signer(self, commit: Commit, by: Signature, claimed: str, key: str) -> None:
        """Of a signed run: one key an epoch, that of its claim (`claimed`), and none that was revoked before; no
        operator's in what operators do not ask for."""
        begins = isinstance(commit, EpochStart)
        self.epoch_key = by.public if begins else self.epoch_key
        rules = [
            (by.public == self.epoch_key, f"is signed with another key than its epoch {commit.epoch} began under"),
            (not begins or by.public == claimed, f"begins an epoch that another key claimed: epoch {commit.epoch}"),
            (by.public not in self.revoked, f"is signed by {by.signer} with a key that was revoked before"),
            (not _is_syncers(commit) or by.signer != OPERATOR, "is signed by the operator, who only answers requests"),
        ]
        for holds, otherwise in rules:
            self.expect(holds, "keys", f"{key}: {otherwise}")

    def _check_outputs(self, commit: Commit, key: str) -> bool:
        """Whether the commit brings the fragments that are due, as versions of its own number."""
        num_fragments = self.run.num_fragments
        due = list(range(num_fragments)) if isinstance(commit, Rollback) or commit.n == 0 else []
        due = [fragment_of_slot(self.slot, num_fragments)] if isinstance(commit, Merge) else due
        brought = [output.fragment for output in commit.outputs]
        numbered = all(output.version == commit.n and output.epoch == commit.epoch for output in commit.outputs)
        self.expect(brought == due, "1", f"{key}: brings fragments {brought} instead of {due}")
        self.expect(numbered, "1", f"{key}: brings a version of another commit or epoch")
        slot = self.slot if isinstance(commit, Merge) else self.slot - 1
        self.expect(
            all(o.slot == slot for o in commit.outputs), "1", f"{key}: brings a version of another slot than {slot}"
        )
        return brought == due

    def _check_merge(self, commit: Merge, key: str) -> None:
        """Checks the merge as a whole; _check_input checks each input."""
        names = [item.learner for item in commit.inputs]
        quorum, tokens = self.run.settings.sync.quorum, sum(item.counted for item in commit.inputs)
        self.expect(names == sorted(set(names)), "5", f"{key}: inputs are not sorted and distinct by learner")
        self.expect(commit.quorum == quorum, "5", f"{key}: quorum {commit.quorum}, but the run's is {quorum}")
        self.expect(len(names) >= quorum, "5", f"{key}: {len(names)} inputs, quorum {quorum}")
        self.expect(
            commit.tokens == tokens, "4", f"{key}: {commit.tokens} tokens, but {tokens} of its inputs are believed"
        )

    def _check_input(self, item: MergedOffer, fragment: int, key: str) -> bool:
        """Whether the offer could be applied, by the log alone; enters it into the books."""
        who = f"{key}: offer {item.incarnation}/{item.seq} of {item.learner}"
        settled, place = self._outcome_at(item)
        outcome = settled[place]
        used = self.bases.setdefault((item.learner, fragment), set())
        self.duplicates += bool(outcome & APPLIED)
        end, base = self.ranges.get((item.learner, fragment), 0), self.version(fragment, item.base)
        rules = [
            (base is not None, "6", f"uses base {item.base}, which fragment {fragment} never had"),
            (base is None or self._is_recent(base), "6", f"uses base {item.base}, from behind the staleness limit"),
            (not outcome & REFUSED, "2", "is applied and was refused"),
            (item.base not in used, "2", f"uses base {item.base} a second time"),
            (item.incarnation >= self.floors[item.learner], "2", "is of an old incarnation"),
            (item.data_start >= end, "2", f"brings data that fragment {fragment} has already seen"),
            (item.base >= self.base_floor, "2", f"uses base {item.base}, from behind a rollback"),
            (self._counts(item), "2", "comes from a key that was revoked before"),
            (item.learner not in self.kept_out, "2", "comes from a learner in quarantine"),
            *self._numbers(item),
        ]
        for holds, rule, otherwise in rules:
            self.expect(holds, rule, f"{who} {otherwise}")
        settled[place] |= APPLIED
        used.add(item.base)
        self.ranges[item.learner, fragment] = max(item.data_end, end)
        return all(holds for holds, _, _ in rules)

    def _is_recent(self, base: FragmentVersion) -> bool:
        """Whether a base is not too old; the current version never is, also after skipped slots."""
        limit = (self.run.settings.sync.staleness_rounds + 1) * self.run.num_fragments
        return self.slot - base.slot <= limit or base is self.versions[base.fragment][-1]

    def _numbers(self, item: MergedOffer) -> list[tuple[bool, str, str]]:
        island = self.run.island(item.learner)
        batch = 0 if island is None else island.batch_tokens
        possible = 0 < item.tokens < MAX_EXACT and 0 < item.steps < MAX_EXACT
        span, doubted = item.data_end - item.data_start, self.proven.get(item.learner, LearnerRecord()).doubted
        most = item.tokens + doubted // self._parameters_due
        return [
            (island is not None, "4", "comes from a learner that the run does not have"),
            (possible, "4", f"counts {item.tokens} tokens in {item.steps} steps"),
            (item.steps <= max_steps(self.run), "4", f"counts {item.steps} steps, more than an offer can hold"),
            (item.tokens <= item.steps * batch, "4", f"counts {item.tokens} tokens in {item.steps} steps of {batch}"),
            (item.tokens == span, "4", f"counts {item.tokens} tokens in a data range of {span}"),
            (0 < item.counted <= most, "4", f"is believed {item.counted} of {most} tokens"),
        ]

    def _check_judgement(self, commit: Merge, key: str) -> None:
        """Checks how the slot's deltas were weighed and scaled, by the norms that the log states."""
        deltas = [
            JudgedDelta(
                learner=item.learner,
                steps=max(1, item.counted_steps),
                stated=max(1, item.steps),
                norm=item.norm,
                weight=offered_weight(self.run, item.learner, item.tokens, item.steps, item.counted),
            )
            for item in commit.inputs
        ]
        known = self.norms.get(fragment_of_slot(commit.slot, self.run.num_fragments), NOTHING)
        for item, verdict in zip(commit.inputs, judge(known, deltas, self.run.settings.sync.clip), strict=True):
            who = f"{key}: offer {item.incarnation}/{item.seq} of {item.learner}"
            self.expect(
                item.weight == verdict.weight, "8", f"{who} has weight {item.weight} instead of {verdict.weight}"
            )
            scaled = f"{who} is scaled by {item.scale}, where its norm gives {verdict.scale}"
            self.expect(item.scale == verdict.scale, "8", scaled)

    def _check_speeds(self, commit: Merge, key: str) -> None:
        """Checks which speeds count as proven, and enters them into the books."""
        fragment = fragment_of_slot(self.slot, self.run.num_fragments)
        due = proven(self.run, self.proven, fragment, commit.inputs)
        for item, should in zip(commit.inputs, due, strict=True):
            same = isclose(item.proven, should.proven, rel_tol=1e-6)
            fault = f"{key}: {item.learner} has proven {item.proven:.9g} tokens/s instead of {should.proven:.9g}"
            self.expect(same, "4", fault)
            known = self.proven.get(item.learner, LearnerRecord())
            doubted = max(0, known.doubted + (item.tokens - item.counted) * self._parameters_due)
            self.proven[item.learner] = LearnerRecord(proven=item.proven, merges=known.merges + 1, doubted=doubted)

    def _counts(self, offer: MergedOffer | Outcome) -> bool:
        """Whether the key of an offer is not revoked."""
        return key_of(offer.incarnation) not in {fingerprint(public) for public in self.revoked}

    def _outcome_at(self, offer: MergedOffer | Outcome) -> tuple[bytearray, int]:
        """The page of an offer's outcome, and its place there."""
        return self.offer_outcomes[offer.learner, offer.incarnation, offer.seq // PAGE], offer.seq % PAGE

    def _check_outcomes(self, commit: Commit, key: str) -> None:
        for outcome in commit.outcomes:
            settled, place = self._outcome_at(outcome)
            before = settled[place]
            who = f"{key}: offer {outcome.incarnation}/{outcome.seq} of {outcome.learner}"
            self.expect(not before & APPLIED, "2", f"{who} is refused and was applied")
            self.expect(not before & REFUSED, "2", f"{who} is refused a second time")
            known = self.run.island(outcome.learner) is not None
            self.expect(known, "2", f"{who} comes from a learner that the run does not have")
            settled[place] |= REFUSED

    def _check_kind(self, commit: Commit, key: str) -> None:
        """Checks by the commit's kind: a learner that joins, is kept out or readmitted; a rollback; a floor."""
        self._check_loss(commit, key)
        match commit:
            case Membership():
                self._check_members(commit, key)
            case Quarantine() | Readmit():
                name, keeps_out = commit.learner, isinstance(commit, Quarantine)
                self.expect(
                    self.run.island(name) is not None, "1", f"{key}: a {commit.kind} of {name!a}, not in the run"
                )
                fits = (name in self.kept_out) != keeps_out
                self.expect(fits, "1", f"{key}: a second {commit.kind} of {name!a}")
                if isinstance(commit, Quarantine):
                    self._check_cause(commit, key)
            case Revoke():
                self.expect(commit.key not in self.revoked, "1", f"{key}: revokes a key a second time")
            case Rollback():
                self._check_rollback(commit, key)
            case Finish():
                target = self.run.settings.train.tokens
                self.expect(self.tokens >= target, "4", f"{key}: finishes at {self.tokens} of {target} tokens")
            case CollectionFloor():
                rises = self.gc_floor < commit.floor < commit.n
                self.expect(rises, "9", f"{key}: floor {commit.floor} after {self.gc_floor}")

    def _check_members(self, commit: Membership, key: str) -> None:
        """Checks that each joins under a new name, with a data shard left for it."""
        run = self.run
        for island in commit.islands:
            why = contradiction_of_member(island, run)
            self.expect(why is None, "1", f"{key}: {island.name!a} joins, but {why}")
            run = replace(run, members=(*run.members, island))

    def _check_cause(self, commit: Quarantine, key: str) -> None:
        """Checks that a quarantine follows enough bad offers or was asked for, and leaves enough other learners for the
        quorum."""
        name, quorum = commit.learner, self.run.settings.sync.quorum
        bad = self.bad_in_a_row.get(name, 0)
        due = are_too_many(bad) or commit.request is not None
        self.expect(due, "blame", f"{key}: a quarantine after {bad} bad offers in a row")
        left = len({island.name for island in self.run.all_islands} - self.kept_out - {name})
        self.expect(left >= quorum, "blame", f"{key}: a quarantine of {name!a} leaves {left} learners, quorum {quorum}")

    def _check_rollback(self, commit: Rollback, key: str) -> None:
        """Checks that versions and shares are those after the target commit; the digests cover the bytes."""
        if not self.gc_floor <= commit.to < commit.n:
            self.expect(False, "9", f"{key}: goes back to commit {commit.to}, which is not there")
            return
        shares = {name: share for name, share in self.shares_after.get(commit.to, {}).items() if share}
        self.expect(dict(commit.shares) == shares, "4", f"{key}: other shares than there were after commit {commit.to}")
        for output in commit.outputs:
            then = self.version_at(output.fragment, commit.to)
            digests = None if then is None else (then.state_digest, then.weights_digest)
            same = digests == (output.state_digest, output.weights_digest)
            self.expect(same, "3", f"{key}: fragment {output.fragment} is not what it was after commit {commit.to}")

    def _check_loss(self, commit: Commit, key: str) -> None:
        """Checks what the log says of jumps of the held-out loss, and of what followed them. The losses themselves are
        not evaluated again."""
        known, settings = self.stability, self.run.settings.evaluation
        rules: list[tuple[bool, str]] = []
        match commit:
            case Evaluation():
                jumps = bool(jump_of(commit.loss, known.good, settings))
                text = "does not say" if jumps else "says"
                rules = [(commit.jumped == jumps, f"it {text} that the loss has jumped")]
            case Rollback() if commit.evaluated is not None:
                jumped = known.jump is not None and known.jump.n == commit.evaluated
                good = any(at.n == commit.to for at in known.good[-1:])
                rules = [
                    (jumped, f"goes back for commit {commit.evaluated}, whose loss has not jumped"),
                    (good, f"goes back to commit {commit.to}, not to the last one that evaluated well"),
                    (settings.on_divergence == "rollback", "goes back, and the run's settings say otherwise"),
                    (known.recovers_beyond is None, "goes back a second time before the loss had recovered"),
                ]
        for holds, otherwise in rules:
            self.expect(holds, "divergence", f"{key}: {otherwise}")

    def settle(self, commit: Commit) -> None:
        """Enter a checked commit into the books."""
        self._settle_shares(commit)
        self._count_bad(commit)
        self.stability = commit.stability_after(self.stability)
        self.norms = commit.norms_after(self.norms, self.run.num_fragments)
        offers: list[MergedOffer | Outcome] = [*commit.inputs, *commit.outcomes]
        named = [(one.learner, one.incarnation) for one in offers if self._counts(one)]
        for name, incarnation in named:
            self.floors[name] = max(incarnation, self.floors[name])
        if commit.request is not None:
            self.next_request = max(self.next_request, commit.request + 1)
        match commit:
            case Merge() | Skip():
                self.slot += 1
            case Membership():
                self.run = replace(self.run, members=(*self.run.members, *commit.islands))
            case Quarantine():
                self.kept_out.add(commit.learner)
            case Readmit():
                self.kept_out.discard(commit.learner)
            case Revoke():
                self.revoked.add(commit.key)
            case CollectionFloor():
                self.gc_floor = max(self.gc_floor, commit.floor)
                self._forget()
        for output in commit.outputs:
            self.versions.setdefault(output.fragment, []).append(output)

    def _forget(self) -> None:
        """Forget what no correct commit can refer to any more: versions that are neither recent nor those of a commit
        that a rollback may go back to, their bases, and shares behind the floor."""
        for fragment, versions in self.versions.items():
            then = self.version_at(fragment, self.gc_floor)
            first = next(i for i, one in enumerate(versions) if one is then or self._is_recent(one))
            del versions[:first]
            for (_, of), used in self.bases.items():
                if of == fragment:
                    used -= {base for base in used if base < versions[0].version}
        self.shares_after = {n: shares for n, shares in self.shares_after.items() if n >= self.gc_floor}

    def _settle_shares(self, commit: Commit) -> None:
        if commit.inputs:  # they count for the fragment that was due, also if the commit brings another one
            self.shares = dict(self.shares)
            for item in commit.inputs:
                self.shares[item.learner] = self.shares.get(item.learner, 0) + item.counted * self._parameters_due
        if isinstance(commit, Rollback):
            self.shares, self.base_floor = self.shares_after.get(commit.to, {}), commit.n
            self.proven = {name: structs.replace(known, doubted=0) for name, known in self.proven.items()}
        self.shares_after[commit.n] = self.shares

    def _count_bad(self, commit: Commit) -> None:
        for name in {outcome.learner for outcome in commit.outcomes} | {item.learner for item in commit.inputs}:
            applied = sum(item.learner == name for item in commit.inputs)
            bad = sum(outcome.learner == name and is_bad(outcome.reason) for outcome in commit.outcomes)
            self.bad_in_a_row[name] = bad_in_a_row(self.bad_in_a_row.get(name, 0), applied, bad)
        if isinstance(commit, Quarantine | Readmit):
            self.bad_in_a_row[commit.learner] = 0

    def version_at(self, fragment: int, n: int) -> FragmentVersion | None:
        """The fragment as of commit n."""
        return next((o for o in reversed(self.versions.get(fragment, [])) if o.version <= n), None)

    def version(self, fragment: int, number: int) -> FragmentVersion | None:
        """The version of that number; looked up from the newest back, because bases are recent."""
        return next((o for o in reversed(self.versions.get(fragment, [])) if o.version == number), None)


def _is_syncers(commit: Commit) -> bool:
    """Whether no command under the operator's key may make it."""
    match commit:
        case EpochStart():
            return commit.serves
        case Quarantine():
            return commit.request is None
    return isinstance(commit, Merge | Skip | Evaluation | Finish)


def disagreements(offer: Offer, item: MergedOffer, fragment: int) -> list[str]:
    """The names of the fields in which the log and the offer itself differ."""
    numbers = ("learner", "incarnation", "seq", "base", "data_start", "data_end", "tokens", "steps")
    shared = (*numbers, "payload_digest", "payload_bytes")
    wrong = [name for name in shared if getattr(offer, name) != getattr(item, name)]
    return wrong if offer.fragment == fragment else [*wrong, "fragment"]
