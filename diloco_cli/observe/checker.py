"""The one independent checker of a log: each commit against the facts of all commits before it.

`diloco verify` and the simulated histories (`tests/histories/`) feed it commit by commit, and compute the merges
themselves. It keeps its own books and never reads the folded state of the daemons (`protocol/log/state.py`), so an
error in their code shows here. How norms are judged, and what is a jump of the loss, are the product's own rules,
applied to these books.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

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
from diloco_cli.protocol.log.directions import flipping_of, opposes, opposition_after
from diloco_cli.protocol.log.faults import faults_after, faults_for_quarantine
from diloco_cli.protocol.log.norms import NOTHING, Norms, norms_after
from diloco_cli.protocol.log.records import MAX_EXACT, FragmentVersion, MergedOffer, Offer, RunFormat, fragment_of_slot
from diloco_cli.protocol.log.stability import Stability, stability_after
from diloco_cli.protocol.rules.divergence import MAX_ROLLBACKS, jump_of
from diloco_cli.protocol.rules.eligibility import max_steps, offered_weight, round_steps
from diloco_cli.protocol.rules.merging import rebase_of_next
from diloco_cli.protocol.rules.norms import JudgedDelta, judge
from diloco_cli.signing import OPERATOR, Signature

APPLIED, REFUSED = 1, 2
MOST_SKIPPED = 1 << 16  # numbers of one incarnation's offers follow each other; others are kept one by one
Expect = Callable[[bool, str, str], None]  # (whether it holds, the rule of ARCHITECTURE.md, what is wrong)


class SettledOffers:
    """The outcomes of offers, in a byte each: a run of a month has millions. An offer may be both applied and refused
    where a log is wrong."""

    def __init__(self) -> None:
        self._dense: dict[tuple[str, int], bytearray] = defaultdict(bytearray)
        self._strewn: dict[tuple[str, int, int], int] = {}

    def outcome(self, learner: str, incarnation: int, seq: int) -> int:
        """The sum of APPLIED and REFUSED; 0 for an offer that has no outcome."""
        dense = self._dense.get((learner, incarnation), b"")
        return dense[seq] if 0 <= seq < len(dense) else self._strewn.get((learner, incarnation, seq), 0)

    def settle(self, learner: str, incarnation: int, seq: int, outcome: int) -> None:
        dense = self._dense[learner, incarnation]
        if not 0 <= seq <= len(dense) + MOST_SKIPPED or (learner, incarnation, seq) in self._strewn:
            offer_id = (learner, incarnation, seq)
            self._strewn[offer_id] = self._strewn.get(offer_id, 0) | outcome
            return
        if seq >= len(dense):
            dense.extend(bytes(seq + 1 - len(dense)))
        dense[seq] |= outcome


class Checker:
    """The facts from earlier commits. For each commit call `check`, then `settle`. `expect(holds, rule, otherwise)` is
    called for each rule."""

    def __init__(self, run: RunFormat, expect: Expect) -> None:
        self.run, self.expect = run, expect
        self.versions: dict[int, list[FragmentVersion]] = {}
        self.offers = SettledOffers()
        self.bases: dict[tuple[str, int], set[int]] = {}
        self.ranges: dict[tuple[str, int], int] = {}
        self.floors: dict[str, int] = defaultdict(int)
        self.slot = 0
        self.epoch = 0
        self.duplicates = 0
        self.finished = self.stopped = False
        self.base_floor = self.gc_floor = self.next_request = 0
        self.faults: dict[str, float] = {}
        self.kept_out: set[str] = set()
        self.revoked: set[str] = set()
        self.epoch_key = ""
        self.norms: Norms = {}
        self.opposition: dict[str, float] = {}
        self.shares: dict[str, int] = {}
        self.shares_after: dict[int, dict[str, int]] = {}
        self.losses = LossBooks(run, expect)

    @property
    def token_parameters(self) -> int:
        """Sum of tokens x parameters of the fragment, over the offers that count."""
        return sum(self.shares.values())

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
        if isinstance(commit, Merge | Skip):
            self.check_judgement(commit, key)
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
        served = isinstance(commit, Merge | Skip | Quarantine | Finish)
        served = served or (isinstance(commit, EpochStart) and commit.serves)
        rules = [
            (by.public == self.epoch_key, f"is signed with another key than its epoch {commit.epoch} began under"),
            (not begins or by.public == claimed, f"begins an epoch that another key claimed: epoch {commit.epoch}"),
            (by.public not in self.revoked, f"is signed by {by.signer} with a key that was revoked before"),
            (not served or by.signer != OPERATOR, "is signed by the operator, who only answers requests"),
        ]
        for holds, otherwise in rules:
            self.expect(holds, "keys", f"{key}: {otherwise}")

    def _check_outputs(self, commit: Commit, key: str) -> bool:
        """Whether the commit brings the fragments that are due, as versions of its own number."""
        due: list[int] = []
        if commit.n == 0 or isinstance(commit, Rollback):
            due = list(range(self.run.num_fragments))
        elif isinstance(commit, Merge):
            due = [fragment_of_slot(self.slot, self.run.num_fragments)]
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
        quorum, tokens = self.run.settings.sync.quorum, sum(item.tokens for item in commit.inputs)
        self.expect(names == sorted(set(names)), "5", f"{key}: inputs are not sorted and distinct by learner")
        self.expect(commit.quorum == quorum, "5", f"{key}: quorum {commit.quorum}, but the run's is {quorum}")
        self.expect(len(names) >= quorum, "5", f"{key}: {len(names)} inputs, quorum {quorum}")
        self.expect(commit.tokens == tokens, "4", f"{key}: {commit.tokens} tokens, but its inputs have {tokens}")
        for output in commit.outputs:
            before = self.versions.get(output.fragment, [None])[-1]
            rebase = rebase_of_next(self.run.settings.sync, before, commit.agreement)
            self.expect(output.rebase == rebase, "3", f"{key}: rebase is {output.rebase} instead of {rebase}")

    def _check_input(self, item: MergedOffer, fragment: int, key: str) -> bool:
        """Whether the offer could be applied, by the log alone; enters it into the books."""
        who = f"{key}: offer {item.incarnation}/{item.seq} of {item.learner}"
        outcome = self.offers.outcome(item.learner, item.incarnation, item.seq)
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
            (item.learner not in self.kept_out, "2", "comes from a learner in quarantine"),
            *self._numbers(item),
        ]
        for holds, rule, otherwise in rules:
            self.expect(holds, rule, f"{who} {otherwise}")
        self.offers.settle(item.learner, item.incarnation, item.seq, APPLIED)
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
        span = item.data_end - item.data_start
        return [
            (island is not None, "4", "comes from a learner that the run does not have"),
            (possible, "4", f"counts {item.tokens} tokens in {item.steps} steps"),
            (item.steps <= max_steps(self.run), "4", f"counts {item.steps} steps, more than an offer can hold"),
            (item.tokens <= item.steps * batch, "4", f"counts {item.tokens} tokens in {item.steps} steps of {batch}"),
            (item.tokens == span, "4", f"counts {item.tokens} tokens in a data range of {span}"),
        ]

    def check_judgement(self, commit: Merge | Skip, key: str) -> None:
        """Checks which deltas of the slot were refused for their norm, and how the others were weighed and scaled, by
        the norms that the log states."""
        sync, fragment = self.run.settings.sync, fragment_of_slot(commit.slot, self.run.num_fragments)
        refused = [one for one in commit.outcomes if one.norm is not None]
        stated = [
            (one.learner, max(1, one.steps), one.norm, offered_weight(self.run, one.learner, one.tokens, one.steps))
            for one in commit.inputs
        ] + [(one.learner, one.steps or 1, one.norm or 0.0, 0.0) for one in refused]
        flipping = flipping_of({one.learner: one.agrees for one in commit.inputs if one.agrees is not None}) or set()
        deltas = [
            JudgedDelta(
                *one, round_steps=round_steps(self.run, one[0]),
                opposes=opposes(self.opposition, one[0]) or one[0] in flipping,
            )
            for one in stated
        ]  # fmt: skip
        known = self.norms.get(fragment, NOTHING)
        judgement = judge(known, deltas, sync)
        verdicts = judgement.verdicts
        if isinstance(commit, Skip):  # which does not state the norms of those that were not refused
            verdicts = tuple(judge(known, [delta], sync).verdicts[0] for delta in deltas)
        for item, verdict in zip(commit.inputs, verdicts, strict=False):
            who = f"{key}: offer {item.incarnation}/{item.seq} of {item.learner}"
            self.expect(not verdict.refused, "8", f"{who} is merged, and {verdict.refused}")
            weight, scale = (item.weight, item.scale) if verdict.refused else (verdict.weight, verdict.scale)
            self.expect(item.weight == weight, "8", f"{who} has weight {item.weight} instead of {weight}")
            self.expect(item.scale == scale, "8", f"{who} is scaled by {item.scale}, where its norm gives {scale}")
        for outcome, verdict in zip(refused, verdicts[len(commit.inputs) :], strict=True):
            who = f"{key}: offer {outcome.incarnation}/{outcome.seq} of {outcome.learner}"
            self.expect(bool(verdict.refused), "8", f"{who} is refused for a norm that is usual")
            self.expect(outcome.fragment == fragment, "8", f"{who} is judged in a slot of fragment {fragment}")
        step = getattr(commit, "step", judgement.step)
        self.expect(step == judgement.step, "8", f"{key}: shortened by {step} instead of {judgement.step}")

    def _check_outcomes(self, commit: Commit, key: str) -> None:
        for outcome in commit.outcomes:
            before = self.offers.outcome(outcome.learner, outcome.incarnation, outcome.seq)
            who = f"{key}: offer {outcome.incarnation}/{outcome.seq} of {outcome.learner}"
            self.expect(not before & APPLIED, "2", f"{who} is refused and was applied")
            self.expect(not before & REFUSED, "2", f"{who} is refused a second time")
            known = self.run.island(outcome.learner) is not None
            self.expect(known, "2", f"{who} comes from a learner that the run does not have")
            judged = outcome.reason == "norm_cap" and isinstance(commit, Merge | Skip)
            stated = outcome.norm is not None and outcome.steps is not None
            self.expect(stated == judged or not stated, "8", f"{who}: {outcome.reason} with a norm, in a {commit.kind}")
            self.expect(stated or outcome.reason != "norm_cap", "8", f"{who} is refused for a norm that is not stated")
            self.offers.settle(outcome.learner, outcome.incarnation, outcome.seq, REFUSED)

    def _check_kind(self, commit: Commit, key: str) -> None:
        """Checks by the commit's kind: a learner that joins, is kept out or readmitted; a rollback; a floor."""
        self.losses.check(commit, key)
        match commit:
            case Membership():
                self._check_members(commit, key)
            case Quarantine() | Readmit():
                name, keeps_out = commit.learner, isinstance(commit, Quarantine)
                self.expect(
                    self.run.island(name) is not None, "1", f"{key}: a {commit.kind} of {name!a}, not in the run"
                )
                blamed = isinstance(commit, Quarantine) and commit.evaluated is not None
                fits = (name in self.kept_out) != keeps_out or blamed
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
        """Checks that a quarantine has enough faults (or blames for a jump, see LossBooks), and leaves enough other
        learners for the quorum."""
        name, quorum = commit.learner, self.run.settings.sync.quorum
        faults = self.faults.get(name, 0)
        enough = commit.evaluated is not None or faults >= faults_for_quarantine(self.run.num_fragments)
        self.expect(enough, "blame", f"{key}: a quarantine after {faults:g} faults")
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

    def settle(self, commit: Commit) -> None:
        """Enter a checked commit into the books."""
        self._settle_shares(commit)
        self._settle_faults(commit)
        self.losses.settle(commit)
        self.norms = norms_after(self.norms, commit, self.run.num_fragments)
        self.opposition = opposition_after(self.opposition, commit)
        named = [(one.learner, one.incarnation) for one in commit.inputs]
        named += [(one.learner, one.incarnation) for one in commit.outcomes]
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
                if commit.learner is not None:
                    self.floors[commit.learner] = max(commit.floor, self.floors[commit.learner])
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
            parameters = self.run.layout.fragments[fragment_of_slot(self.slot, self.run.num_fragments)].num_parameters
            self.shares = dict(self.shares)
            for item in commit.inputs:
                self.shares[item.learner] = self.shares.get(item.learner, 0) + item.tokens * parameters
        if isinstance(commit, Rollback):
            self.shares, self.base_floor = self.shares_after.get(commit.to, {}), commit.n
        self.shares_after[commit.n] = self.shares

    def _settle_faults(self, commit: Commit) -> None:
        named = {outcome.learner for outcome in commit.outcomes} | {item.learner for item in commit.inputs}
        named |= {commit.learner} if isinstance(commit, Quarantine | Readmit) else set()
        for name in named:
            self.faults[name] = faults_after(self.faults.get(name, 0), commit, name)

    def version_at(self, fragment: int, n: int) -> FragmentVersion | None:
        """The fragment as of commit n."""
        return next((o for o in reversed(self.versions.get(fragment, [])) if o.version <= n), None)

    def version(self, fragment: int, number: int) -> FragmentVersion | None:
        """The version of that number; looked up from the newest back, because bases are recent."""
        return next((o for o in reversed(self.versions.get(fragment, [])) if o.version == number), None)


class LossBooks:
    """Whether what a log says of jumps of the held-out loss, and of what followed them, fits the run's settings. The
    losses themselves are not evaluated again, nor are the trials that blame a learner. `merged`: the newest commit that
    merged a delta of each learner."""

    def __init__(self, run: RunFormat, expect: Expect) -> None:
        self.settings, self.expect = run.settings.evaluation, expect
        self.known = Stability()
        self.merged: dict[str, int] = {}

    def check(self, commit: Commit, key: str) -> None:
        match commit:
            case Evaluation():
                jumps = bool(jump_of(commit.loss, self.known.good, self.settings))
                text = "does not say that the loss has jumped" if jumps else "says that the loss has jumped"
                self.expect(commit.jumped == jumps, "divergence", f"{key}: it {text}")
            case Rollback() if commit.evaluated is not None:
                self._check_rollback(commit, key)
            case Quarantine() if commit.evaluated is not None:
                case = self.known.rejudging
                judged = case is not None and commit.evaluated == case.head.n and commit.learner in case.names
                self.expect(
                    judged, "divergence", f"{key}: {commit.learner!a} is blamed for commit {commit.evaluated}, unjudged"
                )

    def _check_rollback(self, commit: Rollback, key: str) -> None:
        known = self.known
        jumped = known.jump is not None and known.jump.n == commit.evaluated
        self.expect(jumped, "divergence", f"{key}: goes back for commit {commit.evaluated}, whose loss has not jumped")
        good = any(at.n == commit.to for at in known.good[-1:])
        self.expect(
            good, "divergence", f"{key}: goes back to commit {commit.to}, not to the last one that evaluated well"
        )
        self.expect(
            self.settings.on_divergence == "rollback",
            "divergence",
            f"{key}: goes back, and the run's settings say otherwise",
        )
        self.expect(known.rejudging is None, "divergence", f"{key}: goes back before the verdict on the jump before")
        self.expect(known.rollbacks < MAX_ROLLBACKS, "divergence", f"{key}: goes back after {known.rollbacks} times")

    def settle(self, commit: Commit) -> None:
        self.merged |= {item.learner: commit.n for item in commit.inputs}
        self.known = stability_after(self.known, commit, self.merged)


def disagreements(offer: Offer, item: MergedOffer, fragment: int) -> list[str]:
    """The names of the fields in which the log and the offer itself differ."""
    said = {
        "learner": item.learner, "incarnation": item.incarnation, "seq": item.seq, "fragment": fragment,
        "base": item.base, "data_start": item.data_start, "data_end": item.data_end, "tokens": item.tokens,
        "steps": item.steps, "payload_digest": item.payload_digest, "payload_bytes": item.payload_bytes,
    }  # fmt: skip
    return [name for name, value in said.items() if getattr(offer, name) != value]
