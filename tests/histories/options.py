"""Options drawn from a seed: the run, the fleet, and the enabled faults with their rates. Swarm testing: each seed
leaves most faults out, so that rare combinations are not hidden by common ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, get_args

from diloco_cli.config.run_file import max_overlap
from diloco_cli.config.settings import (
    ColdStartSettings,
    DataSettings,
    EvaluationSettings,
    InnerSettings,
    RetentionSettings,
    RunSettings,
    SyncerSettings,
    SyncSettings,
    TrainSettings,
)
from diloco_cli.digests import digest
from diloco_cli.layout import ParameterFact, balanced_layout
from diloco_cli.protocol.actors.collection import FLOORS_APART
from diloco_cli.protocol.log.commit_log import LONG_WAY, SNAPSHOT_EVERY
from diloco_cli.protocol.log.keys import FORMAT_KEY
from diloco_cli.protocol.log.records import Island, RegionStore, RunFormat
from diloco_cli.signing import PLAIN_BYTES, Checksummed, Secret
from tests.faulty_world import Fault
from tests.histories.poisoner import TACTICS, Tactic
from tests.histories.replayer import POISONER
from tests.histories.stream import Stream

BATCH_TOKENS = 4
CALLS_AN_EXCHANGE = 14  # store calls in a row, from an offer to the adoption of its merge
GRACE_S = 1.0  # of readers, before anything is deleted
REGION = "apart"  # the one with a bucket of its own, in some histories
SLOWEST = "l0"  # its steps take `slowest` times as long
SPARE_SHARDS = 2  # for islands that join
MAX_LEARNERS = 16
SHORT_MERGES, LONG_MERGES, LONG_SHARE = (5, 8), (100, 300), 0.01
SLOW_MERGES, ONLY_SLOW_SHARE = (60, 120), 0.5  # of histories with slow links, which have no other faults then
SECRET = Secret("of histories, " * 3, "a history")
POLLS_A_SLOT, POLL_BOUNDS_S = 6, (0.05, 0.5)  # fewer than the product's: most are in vain
LOOKS_APART, LOOKS_APART_S = 1 / 8, (0.05, 0.15)  # of a learner that expects a commit, in slots; likewise

NemesisKind = Literal[
    "kill", "kill_all", "pause", "zombie", "second_syncer", "outage", "region_outage", "forbidden", "full", "stop",
    "stand_in", "join", "leave", "partial", "wall_jump", "poison", "huge", "corrupt", "unfit", "readmit", "rollback",
    "collect", "slow_link", "harm", "diverge", "rotate", "steal", "lose", "notice",
]  # fmt: skip
MixingSetting = Literal["replace", "rebase"]
MIXINGS: tuple[MixingSetting, ...] = ("replace",) * 5 + ("rebase",) * 4 + ("replace",)
SLOW_LINK: NemesisKind = "slow_link"  # drawn after all else, so that seeds without it mean what they meant before
HARMFUL: tuple[tuple[NemesisKind, ...], ...] = (("harm",),) * 3 + (("diverge",), ("harm", "diverge"))  # likewise
OTHER_KINDS: tuple[NemesisKind, ...] = tuple(
    kind
    for kind in get_args(NemesisKind)
    if kind not in (SLOW_LINK, "harm", "diverge", "rotate", "steal", "lose", "notice")
)
OF_KEYS: tuple[NemesisKind, ...] = ("rotate", "steal")  # likewise, and in signed histories alone
HARM_SHARE, HARMFUL_MERGES = 0.08, (24, 60)
POISON_SHARE, POISONED_MERGES = 0.08, (16, 60)
COMPRESSION_SHARE = 0.15
LOSSES_SHARE, LOSSES_FROM = 0.15, 1000  # the seeds before, by which mutants are found, mean what they meant
MENDS_SOON_S = 2.0  # instead of the product's: histories are short
ENGINE_SHARE, ENGINES_MERGES = 0.08, (12, 40)  # from LOSSES_FROM on
FOLLOWS_SOON = {"PROMPT_S": 0.2, "FIRST_SYNCER_S": 2.0}  # likewise
FORGERS_SHARE, FORGED_MERGES = 0.08, (12, 40)
CALL_FAULTS: tuple[Fault, ...] = tuple(Fault)
LONG = (Fault.FORBIDDEN, Fault.FULL)  # rarely enabled: clients wait long, and nothing happens in the history


@dataclass(frozen=True)
class Options:
    """Everything that defines one history, except the moments of its faults.

    `calls`: faults of single calls that are on; `write_rate`, `read_rate`: their probability at each create or put, and
    at each other call. `apart`: so many of the learners live in a region with a bucket of its own. `list_lag_s`: how
    long a listing may not show a new key, or still show one that is gone. Faults cease after `faulty_share` of the
    merges; above 1 they do not, and those of a script may strike until the last process has left. `signed`: records end
    with signatures instead of checksums. `checks_uploads`: the store refuses damaged uploads.
    """

    learners: int
    syncers: int
    standbys: int
    takeover_s: float
    snapshot_every: int
    kept_rounds: int
    quarantine_after: int
    list_lag_s: float
    fragments: int
    quorum: int
    apart: int
    merges: int
    mixing: MixingSetting
    feedback: bool
    overlap: int | Literal["auto"]
    local_steps: Literal["measured", "planned"]
    steps_a_slot: int
    staleness_rounds: int
    drift_rounds: int
    skip_after_s: float
    step_s: float
    slowest: float
    latency_s: float
    evaluates_every: int
    saves_every_rounds: int
    calls: tuple[Fault, ...]
    write_rate: float
    read_rate: float
    nemesis_events: tuple[NemesisKind, ...]
    faulty_share: float
    signed: bool
    cold_rounds: int = 0
    on_divergence: Literal["rollback", "pause", "warn"] = "rollback"
    poisoner: Tactic | None = None
    forger: bool = False
    plain_bytes: int = PLAIN_BYTES
    checks_uploads: bool = False

    @property
    def engine(self) -> bool:
        """Whether units are jobs, which an engine takes and brings back; then the syncers are alike."""
        return "notice" in self.nemesis_events

    @property
    def slot_s(self) -> float:
        return self.step_s * self.steps_a_slot

    @property
    def max_ahead(self) -> int:
        """So many slots after its base an offer may come."""
        return (self.staleness_rounds + 1) * self.fragments

    @property
    def reach_s(self) -> float:
        """How long after its base an offer may come."""
        return self.max_ahead * self.slot_s

    @property
    def outruns_bases(self) -> bool:
        """Whether two steps of the slowest learner take so many slots that its base is too old afterwards."""
        slots = 2 * self.slowest / self.steps_a_slot
        return self.slowest > 1 and slots >= self.max_ahead

    @property
    def contributions(self) -> float:
        """Roughly how many slots' worth of one learner's tokens a merge brings: one of each participant, and more if
        the exchange takes longer than a slot, or if progress in flight is kept."""
        participants = fmean((self.learners, self.quorum))
        exchange_slots = (2 * POLL_BOUNDS_S[0] + CALLS_AN_EXCHANGE * self.latency_s) / self.slot_s
        kept = 1.4 if self.mixing == "rebase" else 1.0
        return participants * kept * min(2.2, max(1.0, 0.3 + 0.45 * exchange_slots))

    @property
    def constants(self) -> dict[str, object]:
        """Constants of the protocol's modules that have other values than in the product."""
        return {
            "SNAPSHOT_EVERY": self.snapshot_every,
            "LONG_WAY": LONG_WAY // SNAPSHOT_EVERY * self.snapshot_every,
            "FLOORS_APART": 1000 if Fault.FULL in self.calls else FLOORS_APART // 3,  # a full store raises it
            "QUARANTINE_AFTER": self.quarantine_after,
            "PLAIN_BYTES": self.plain_bytes,
            "POLLS_A_SLOT": POLLS_A_SLOT,
            "POLL_BOUNDS_S": POLL_BOUNDS_S,
            "DENSE": LOOKS_APART,
            "DENSE_BOUNDS_S": LOOKS_APART_S,
            **(FOLLOWS_SOON if self.engine else {}),
        } | (dict.fromkeys(("LOOKS_EVERY_S", "STILL_S"), MENDS_SOON_S) if "lose" in self.nemesis_events else {})

    def describe(self) -> str:
        calls = ", ".join(fault.name.lower() for fault in self.calls) or "none"
        others = ", ".join(self.nemesis_events) or "none"
        signed = "signed, " if self.signed else ""
        apart = f", {self.apart} of them in a region of their own" if self.apart else ""
        hostile = "" if self.poisoner is None else f"; a poisoner ({self.poisoner})"
        hostile += "; a forger" * self.forger
        hostile += "; uploads are checked" * self.checks_uploads + "; an engine" * self.engine
        return (
            f"{self.learners} learners{apart}, {self.syncers} syncers, {self.standbys} standbys, "
            f"{self.fragments} fragments, quorum {self.quorum}, {self.merges} merges, {self.mixing}, "
            f"slot {self.slot_s:g} s, latency {1000 * self.latency_s:g} ms, snapshot every {self.snapshot_every}, "
            f"records plain up to {self.plain_bytes} bytes, "
            f"{signed}faults of calls: {calls}; others: {others}{hostile}"
        )

    def without_faults(self) -> Options:
        return replace(self, calls=(), nemesis_events=(), poisoner=None, forger=False)


def drawn_options(seed: int) -> Options:
    draw = Stream(seed, "options")
    learners = draw.choice((1, 1, 1, 2, 2, 2, 2, 3, 3, 4))
    if draw.chance(0.04):
        learners = draw.choice((5, 6, 7, 8, 8, MAX_LEARNERS))
    fragments = draw.choice((1, 1, 2, 2, 3, 4))
    quorum = 1 if draw.chance(0.6) else draw.whole(1, min(learners, 4))
    step_s = draw.choice((0.05, 0.05, 0.1, 0.5))
    steps_a_slot = draw.choice((1, 2, 2, 3))
    every = steps_a_slot * fragments
    overlap_is_set = draw.chance(0.1)
    longest = max_overlap(every, fragments)
    drawn = Options(
        learners=learners,
        syncers=draw.choice((1, 1, 1, 1, 2, 3)),
        standbys=draw.choice((0, 0, 1, 2)),
        takeover_s=draw.choice((0.5, 2.0, 5.0, 15.0)),
        snapshot_every=draw.choice((3, 3, 4, 4, 8)),
        kept_rounds=draw.choice((1, 1, 2, 64)),
        quarantine_after=draw.choice((3, 5)),
        list_lag_s=draw.choice((0.0, 0.0, 0.5, 5.0)),
        fragments=fragments,
        quorum=quorum,
        apart=draw.whole(1, learners) if draw.chance(0.1) else 0,
        merges=draw.whole(*(LONG_MERGES if draw.chance(LONG_SHARE) else SHORT_MERGES)),
        mixing=draw.choice(MIXINGS),
        feedback=draw.chance(0.2),
        overlap=min(longest, draw.choice((0, 1, 2))) if overlap_is_set else draw.choice(("auto", "auto", 0, 1, 2)),
        local_steps="planned" if draw.chance(0.3) else "measured",
        steps_a_slot=steps_a_slot,
        staleness_rounds=draw.choice((1, 2, 2, 3)),
        drift_rounds=draw.choice((2, 4, 4)),
        skip_after_s=draw.choice((0.5, 2.0, 5.0)),
        step_s=step_s,
        slowest=draw.choice((1.0, 1.0, 1.0, 2.0, 3.0)),
        latency_s=draw.choice((0.001, 0.001, 0.005, 0.02)),
        evaluates_every=draw.choice((3, 20)),
        saves_every_rounds=draw.choice((0, 0, 1, 3)),
        calls=tuple(fault for fault in CALL_FAULTS if draw.chance(0.1 if fault in LONG else 0.4)),
        write_rate=draw.choice((0.0, 0.01, 0.03, 0.1)),
        read_rate=draw.choice((0.0, 0.001, 0.005)),
        nemesis_events=tuple(kind for kind in OTHER_KINDS if draw.chance(0.25)),
        faulty_share=draw.between(0.4, 0.8),
        signed=draw.chance(0.1),
        cold_rounds=draw.whole(1, 3) if draw.chance(0.1) and quorum == 1 else 0,
    )
    return _with_hostile(_with_slow_links(drawn, draw) if draw.chance(0.1) else drawn, seed)


def _with_hostile(options: Options, seed: int) -> Options:
    """Each from a stream of its own, so that the others mean what they meant before."""
    options = replace(options, checks_uploads=Stream(seed, "uploads").chance(0.5))
    options = _with_compression(_with_harm(options, seed), seed)
    options = _with_losses(_with_forger(_with_poisoner(_with_keys(options, seed), seed), seed), seed)
    return _with_engine(options, seed)


def _with_engine(options: Options, seed: int) -> Options:
    """In some histories units are jobs, and two syncers are alike, which soon follow each other."""
    draw = Stream(seed, "engine")
    if seed < LOSSES_FROM or not draw.chance(ENGINE_SHARE):
        return options
    merges, kinds = max(options.merges, draw.whole(*ENGINES_MERGES)), (*options.nemesis_events, "notice")
    return replace(options, syncers=2, standbys=0, takeover_s=0.5, merges=merges, nemesis_events=kinds)


def _with_losses(options: Options, seed: int) -> Options:
    """In some histories the bucket loses single records."""
    if seed < LOSSES_FROM or not Stream(seed, "losses").chance(LOSSES_SHARE):
        return options
    return replace(options, nemesis_events=(*options.nemesis_events, "lose"))


def _with_compression(options: Options, seed: int) -> Options:
    """In some of the histories short records are compressed, too."""
    draw = Stream(seed, "long commits")
    if not draw.chance(COMPRESSION_SHARE):
        return options
    return replace(options, plain_bytes=draw.choice((0, 600, 1000)))


def _with_keys(options: Options, seed: int) -> Options:
    """In most signed histories keys are replaced and revoked, in many there is a thief of keys."""
    draw = Stream(seed, "keys")
    events = OF_KEYS[: draw.whole(0, len(OF_KEYS))] if options.signed else ()
    return replace(options, nemesis_events=(*options.nemesis_events, *events))


def _with_poisoner(options: Options, seed: int) -> Options:
    """In some histories one of at least three learners is hostile, and syncers die. Payloads are kept: nobody can tell
    from their ranges what its deltas were."""
    draw = Stream(seed, "poisoner")
    if not draw.chance(POISON_SHARE):
        return options
    learners, merges = max(options.learners, draw.whole(3, 5)), draw.whole(*POISONED_MERGES)
    kinds = tuple(kind for kind in options.nemesis_events if kind not in ("collect", "readmit"))
    return replace(
        options,
        poisoner=draw.choice(TACTICS),
        learners=learners,
        quorum=min(options.quorum, learners - 1),
        merges=max(merges, options.merges),
        kept_rounds=1000,
        nemesis_events=kinds if "kill" in kinds else (*kinds, "kill"),
    )


def _with_forger(options: Options, seed: int) -> Options:
    """In some histories others write into the bucket; half of these are signed, so that forgers have keys, too."""
    draw = Stream(seed, "forger")
    if not draw.chance(FORGERS_SHARE):
        return options
    merges, signed = draw.whole(*FORGED_MERGES), draw.chance(0.5)
    return replace(options, forger=True, signed=options.signed or signed, merges=max(merges, options.merges))


def _with_harm(options: Options, seed: int) -> Options:
    """In some histories deltas do harm, in runs that are evaluated every round and last for some evaluations."""
    draw = Stream(seed, "harm")
    if not draw.chance(HARM_SHARE):
        return options
    events, merges = draw.choice(HARMFUL), draw.whole(*HARMFUL_MERGES)
    harmful = replace(options, merges=max(merges, options.merges), evaluates_every=1, learners=max(2, options.learners))
    return replace(
        harmful,
        nemesis_events=(*options.nemesis_events, *events),
        on_divergence=draw.choice(("rollback", "rollback", "rollback", "pause", "warn")),
    )  # fmt: skip


def _with_slow_links(options: Options, draw: Stream) -> Options:
    """Slow links as one more fault; or as the only one, in runs that go on without the slow learners, and for so long
    that these come to expect long uploads."""
    if draw.chance(ONLY_SLOW_SHARE):
        learners, merges = max(2, options.learners), draw.whole(*SLOW_MERGES)
        quiet = replace(options.without_faults(), learners=learners, quorum=1, merges=merges, faulty_share=0.4)
        return replace(quiet, nemesis_events=(SLOW_LINK,))
    return replace(options, nemesis_events=(*options.nemesis_events, SLOW_LINK))


def run_of(options: Options) -> RunFormat:
    """Equal islands but for the slowest; the run ends after about `merges` merges with all learners."""
    every = options.steps_a_slot * options.fragments
    tokens = round(options.merges * options.steps_a_slot * BATCH_TOKENS * options.contributions)
    settings = RunSettings(
        name="history",
        train=TrainSettings(
            tokens=tokens, batch_tokens=BATCH_TOKENS, inner=InnerSettings(save_every=options.saves_every_rounds)
        ),
        data=DataSettings(shards=options.learners + SPARE_SHARDS),
        evaluation=EvaluationSettings(every=options.evaluates_every, on_divergence=options.on_divergence),
        cold_start=ColdStartSettings(options.cold_rounds),
        syncer=SyncerSettings(standbys=options.standbys, takeover_s=options.takeover_s),
        retention=RetentionSettings(rounds=options.kept_rounds, grace_s=GRACE_S),
        sync=SyncSettings(
            every=every,
            fragments=options.fragments,
            quorum=options.quorum,
            mixing=options.mixing,
            codec="int8" if options.feedback else "bf16",
            error_feedback=options.feedback,
            overlap=options.overlap,
            local_steps=options.local_steps,
            staleness_rounds=options.staleness_rounds,
            drift_rounds=options.drift_rounds,
            skip_after_s=options.skip_after_s,
        ),
    )
    places = ["here"] * (options.learners - options.apart) + [REGION] * options.apart
    names = [f"l{i}" for i in range(options.learners)]
    names[-1:] = names[-1:] if options.poisoner is None else [POISONER]
    islands = tuple(
        Island(name, place, BATCH_TOKENS, every, BATCH_TOKENS / options.step_s, options.step_s)
        for name, place in zip(names, places, strict=True)
    )
    facts = [ParameterFact(f"w{i}", (1,), False) for i in range(options.fragments)]
    layout = balanced_layout(facts, options.fragments)
    run = RunFormat(
        "id", "history", "2000-01-01T00:00:00.000Z", settings, islands, layout, "simulated",
        regions=(RegionStore(REGION, "memory://region"),) if options.apart else (), home_url="memory://home",
        checksums=not options.signed, keyring=Checksummed("id"),
    )  # fmt: skip
    if not options.signed:
        return run
    return replace(run, signing=SECRET.signing(), keyring=SECRET.keyring(run.run_id))


def with_key(run: RunFormat, signer: str, made: int = 0) -> RunFormat:
    """The run as a process has it whose machine holds its signer's key number `made`, and no other; it has read the
    format alone."""
    run = replace(run, kept={key: data for key, data in run.kept.items() if key == FORMAT_KEY})
    if run.signing is None:
        return run
    private = digest(f"key {made} of {signer}".encode()).rpartition("-")[2]
    secret = Secret(SECRET.certified(run.run_id, {signer: private}), "a history")
    return replace(run, keyring=secret.keyring(run.run_id))
