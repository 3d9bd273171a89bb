"""The mutants that protocols of this kind are known to make, each as a mutated actor: the product has no switch for
any of them. A simulation is worth what it notices of these. `seeds.json` names the seed that shows each mutant.

python -m tests.simulation.mutants      finds a seed again for each mutant whose own shows it no more
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from diloco_cli.protocol.actors.collection import Collector, Sweep
from diloco_cli.protocol.actors.inbox import Inbox
from diloco_cli.protocol.actors.merging import Loader
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.protocol.actors.syncer import Evaluations
from tests.faulty_world import Fault
from tests.histories.campaign import lived
from tests.histories.liveness import COLLECTS_BELOW
from tests.histories.options import SLOW_LINK, Options, drawn_options
from tests.histories.replayer import ViolationError
from tests.histories.script import Actors
from tests.simulation import mutant_collectors as collectors
from tests.simulation import mutant_evaluations as evaluations
from tests.simulation import mutant_learners as learners
from tests.simulation import mutant_logs as logs
from tests.simulation import mutant_norms as norms
from tests.simulation import mutant_sets as sets
from tests.simulation import mutant_syncers as syncers

SEEDS = Path(__file__).with_name("seeds.json")
WITHIN_SEEDS = 1000


def _books(progress: type[Progress]) -> Actors:
    return Actors(learner=learners.with_progress(progress))


def _reading(inbox: type[Inbox]) -> Actors:
    return Actors(syncer=logs.with_inbox(inbox))


def _loading(loader: type[Loader]) -> Actors:
    return Actors(syncer=logs.with_loader(loader))


def _collecting(collector: type[Collector]) -> Actors:
    return Actors(syncer=collectors.with_collector(collector))


def _sweeping(sweep: type[Sweep]) -> Actors:
    return _collecting(collectors.sweeping(sweep))


@dataclass(frozen=True)
class Mutant:
    """`needs`: histories without which it cannot show, so that none is spent on the others; `broken`: invariants one of
    which must break; `walls`: it shows where wall clocks are others; `longer`: it shows only in histories that last for
    so many merges."""

    actors: Actors
    broken: frozenset[str]
    needs: Callable[[Options], bool] = lambda options: True
    walls: bool = False
    longer: int | None = None

    def violation(self, seed: int) -> ViolationError | None:
        """What the history of this seed shows of it."""
        drawn = drawn_options(seed)
        options = drawn if self.longer is None else replace(drawn, merges=self.longer)
        return lived(seed, options, self.actors, other_walls=self.walls).violation

    def is_shown_by(self, seed: int) -> bool:
        violation = self.violation(seed)
        return violation is not None and violation.invariant in self.broken


def _evaluating(kind: type[Evaluations]) -> Actors:
    return Actors(syncer=evaluations.with_evaluations(kind))


def _is_poisoned(*tactics: str) -> Callable[[Options], bool]:
    return lambda options: options.poisoner in tactics


def _suffers(*kinds: str) -> Callable[[Options], bool]:
    return lambda options: any(kind in options.nemesis_events for kind in kinds)


def _collects(options: Options) -> bool:
    return options.kept_rounds == 1 or "collect" in options.nemesis_events


def _collects_often(options: Options) -> bool:
    return options.kept_rounds <= 2 and options.learners <= 4 and options.fragments <= 2


def _saves(options: Options) -> bool:
    return options.saves_every_rounds > 0


def _saves_and_restarts(options: Options) -> bool:
    return _saves(options) and options.learners <= 4 and _KILLS(options)


def _rolls_back_slowly(options: Options) -> bool:
    """Uploads may take so long that a rollback comes before their end."""
    slow = options.write_rate >= 0.03 and bool(SLOW & set(options.calls))
    return slow and options.learners <= 4 and _ROLLS_BACK(options)


def _outages_of_few(options: Options) -> bool:
    return options.learners <= 4 and _suffers("outage", "pause")(options)


def _rebases(options: Options) -> bool:
    return options.mixing == "rebase"


def _keeps_pace(options: Options) -> bool:
    """Several learners and fragments, each of which is there for nearly all merges."""
    paces = (options.local_steps, options.overlap) == ("measured", "auto")
    return paces and 1 < options.learners <= 4 and options.fragments > 1 and not options.apart


def _collects_in_time(options: Options) -> bool:
    """Its syncer has time to collect, and what it keeps is little."""
    at_home = not options.apart and options.learners <= 4
    return at_home and options.kept_rounds == 1 and options.latency_s < COLLECTS_BELOW * options.slot_s / 8


def _finds_no_room(options: Options) -> bool:
    return Fault.FULL in options.calls and options.learners <= 3 and not options.apart


def _damages_reads(options: Options) -> bool:
    return Fault.FLIPPED in options.calls and options.read_rate >= 0.005 and options.learners <= 4


_KILLS = _suffers("kill", "kill_all", "zombie")
_ROLLS_BACK, _JOINS = _suffers("rollback"), _suffers("join")
LONG = 120  # merges
SLOW = {Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE, Fault.SLOW}
OF_THE_LOG: dict[str, Mutant] = {
    "commit by overwrite": Mutant(Actors(client=logs.Overwriting), frozenset("1")),
    "deleted slots": Mutant(Actors(syncer=logs.Tidy), frozenset("1")),
    "412 taken as lost": Mutant(Actors(client=logs.TakesOwnForLost), frozenset("16")),
    "ambiguous taken as success": Mutant(Actors(client=logs.TakesDoubtForSuccess), frozenset("1467")),
    "hash not checked": Mutant(_loading(logs.NoDigests), frozenset("8"), _suffers("corrupt")),
    "non-finite not checked": Mutant(Actors(arithmetic=logs.Gullible), frozenset("8"), _suffers("poison")),
    "no read-back": Mutant(  # a torn state in the log is missing, or stops everybody for good
        Actors(syncer=logs.NoReadBack),
        frozenset({"9", "exit", "liveness"}),
        lambda options: Fault.TORN_WRITE in options.calls and options.write_rate >= 0.1 and not options.checks_uploads,
    ),
    "state without its weights": Mutant(Actors(syncer=logs.StateAlone), frozenset({"9"})),
    "wall clock in the lease": Mutant(
        Actors(standby=logs.WallClockLease), frozenset({"12"}), lambda options: options.standbys > 0, walls=True
    ),
    "snapshot without watermarks": Mutant(Actors(syncer=logs.AlteredSnapshots), frozenset({"2", "10", "loss"})),
    "gap in a mirror": Mutant(Actors(mirror=logs.GapInTheMirror), frozenset("1"), lambda options: options.apart > 0),
}
OF_COLLECTORS: dict[str, Mutant] = {
    "collection without floor": Mutant(_collecting(collectors.HastyCollector), frozenset("9")),
    "moments not kept": Mutant(_sweeping(collectors.EveryMoment), frozenset("9"), _saves),
    "snapshots not kept": Mutant(_sweeping(collectors.EverySnapshot), frozenset("9"), _collects),
    "what a prefetch needs is collected": Mutant(_sweeping(collectors.Undecided), frozenset("9"), _collects),
    "the offer where readers begin is collected": Mutant(_sweeping(collectors.EveryOffer), frozenset("9"), _collects),
    "an offer created behind the floor taken for new": Mutant(
        _reading(collectors.TakesLateForNew), frozenset("2"), _collects_often, longer=LONG // 2
    ),
    "no grace": Mutant(_collecting(collectors.RudeCollector), frozenset("9"), _collects),
    "floor at the head": Mutant(Actors(syncer=collectors.FloorAtTheHead), frozenset("9"), _collects),
    "nothing is deleted": Mutant(
        _collecting(syncers.IdleCollector), frozenset({"bucket"}), _collects_in_time, longer=LONG
    ),
}
OF_SYNCERS: dict[str, Mutant] = {
    "no dedupe": Mutant(_reading(logs.Undiscerning), frozenset("2")),
    "watermark per learner": Mutant(_reading(logs.OneWatermarkALearner), frozenset({"liveness", "10"}), _KILLS),
    "no outcomes at the end": Mutant(Actors(syncer=logs.NoLastOutcomes), frozenset("4")),
    "refusals not told": Mutant(_reading(logs.Mute), frozenset({"4", "liveness"})),
    "merged for another slot": Mutant(_reading(syncers.ForAnySlot), frozenset("7")),
    "merged below the quorum": Mutant(
        Actors(syncer=syncers.OneIsEnough), frozenset("5"), lambda options: options.quorum > 1
    ),
    "merged without waiting": Mutant(
        Actors(syncer=syncers.NoPatience), frozenset({"liveness"}), _keeps_pace, longer=LONG
    ),
    "two commits at once": Mutant(Actors(syncer=sets.TwoCommitsAtOnce), frozenset("1"), _KILLS),
    "a payload changed after its check": Mutant(
        _loading(sets.MergesLaterBytes), frozenset({"3", "exit"}), _damages_reads, longer=LONG
    ),
    "not re-anchored": Mutant(Actors(arithmetic=syncers.NotReanchored), frozenset("3")),
    "momentum lost at a takeover": Mutant(Actors(arithmetic=syncers.NoMomentum), frozenset("3")),
    "one damaged read believed": Mutant(
        _loading(syncers.BelievesOneRead), frozenset({"blame"}), _damages_reads, longer=LONG
    ),
    "quarantined for being late": Mutant(
        Actors(syncer=syncers.KeepsOutTheLate), frozenset({"blame"}), lambda options: options.learners > 1
    ),
    "relayed before its payload": Mutant(
        Actors(relay=syncers.OfferBeforePayload), frozenset("9"), lambda options: options.apart > 0
    ),
    "rolled back for ever": Mutant(
        _evaluating(evaluations.RollsBackForEver), frozenset({"divergence"}), _suffers("diverge")
    ),
    "every rise a jump": Mutant(_evaluating(evaluations.Jumpy), frozenset({"divergence"}), _suffers("harm")),
    "norms judged alone": Mutant(_loading(norms.JudgesAlone), frozenset("8"), _is_poisoned("always", "in turn")),
    "long deltas not clipped": Mutant(_loading(norms.NeverClips), frozenset("8"), _is_poisoned("ratchet")),
    "norms forgotten at a restart": Mutant(_loading(norms.ForgetsAtRestart), frozenset("8"), _is_poisoned("ratchet")),
    "nobody quarantined": Mutant(Actors(syncer=norms.NeverQuarantines), frozenset({"blame"}), _suffers("poison")),
    "outcomes of a lost number dropped": Mutant(
        Actors(syncer=syncers.DropsOutcomes), frozenset({"4", "liveness"}), _finds_no_room, longer=LONG
    ),
    "newcomers not read": Mutant(_reading(syncers.OfTheLaunchOnly), frozenset({"4", "liveness"}), _JOINS),
    "newcomers not answered": Mutant(Actors(syncer=syncers.AdmitsNobody), frozenset({"liveness"}), _JOINS, longer=LONG),
}
OF_LEARNERS: dict[str, Mutant] = {
    "the direct predecessor's offers alone": Mutant(
        Actors(learner=learners.ReadsDirectPredecessor), frozenset("4"), _KILLS
    ),
    "a predecessor's late offer ignored": Mutant(_books(learners.NeverStepsAside), frozenset({"2"}), _KILLS),
    "no incarnations": Mutant(Actors(learner=learners.NoIncarnations), frozenset({"4", "7", "exit"}), _KILLS),
    "another way of states": Mutant(
        Actors(learner=learners.TrainsOnAfterLeaving), frozenset({"exit"}), _suffers("leave")
    ),
    "listing trusted": Mutant(Actors(learner=learners.LooksForTheNewest), frozenset("6")),
    "data dropped silently": Mutant(Actors(learner=learners.DropsSilently), frozenset({"4", "drift"})),
    "data counted twice": Mutant(
        Actors(learner=learners.CountsTwice), frozenset("2"), lambda options: options.mixing == "replace"
    ),
    "no drift bound": Mutant(_books(learners.Boundless), frozenset({"drift"})),
    "waits for its outcome": Mutant(Actors(learner=learners.WaitsForItsOutcome), frozenset({"pace"})),
    "waits for the store": Mutant(Actors(learner=learners.WaitsForTheStore), frozenset({"pace"})),
    "partial batches taken for full": Mutant(_books(learners.FullBatches), frozenset("4"), _suffers("partial")),
    "more steps than made": Mutant(_books(learners.MoreSteps), frozenset("4")),
    "no bound on what a fragment holds": Mutant(_books(learners.Unlimited), frozenset({"blame", "loss"})),
    "a fragment never offered": Mutant(
        _books(learners.LeavesOneOut), frozenset({"liveness"}), _keeps_pace, longer=LONG
    ),
    "late every time": Mutant(_books(learners.LateEveryTime), frozenset({"liveness"})),
    "residual of another offer": Mutant(
        _books(learners.FeedsBackTheNewest), frozenset("4"), lambda options: options.feedback
    ),
    "base not the one it was made from": Mutant(_books(learners.NamesTheNewestBase), frozenset("6")),
    "offer before its payload": Mutant(Actors(learner=learners.OfferFirst), frozenset("9")),
    "older version adopted": Mutant(
        Actors(learner=learners.AdoptsOlderVersions), frozenset("6"), _outages_of_few, longer=LONG
    ),
    "rebase keeps what was merged": Mutant(Actors(learner=learners.KeepsWhatWasMerged), frozenset("4"), _rebases),
    "rebase counts what was merged": Mutant(_books(learners.CountsFromTheAdoption), frozenset("2"), _rebases),
    "uploads dropped at a rollback": Mutant(
        Actors(learner=learners.DropsUploads),
        frozenset({"genuine"}),
        _rolls_back_slowly,
        longer=LONG // 3,
    ),
    "rollback not heard": Mutant(_books(learners.DeafToRollbacks), frozenset("46"), _ROLLS_BACK),
    "moments of what was left behind": Mutant(Actors(learner=learners.MomentsOfAfter), frozenset("6"), _ROLLS_BACK),
    "moments of another incarnation": Mutant(
        Actors(learner=learners.FirstMoments), frozenset({"loss"}), _saves_and_restarts, longer=LONG
    ),
    "moments never saved": Mutant(Actors(learner=learners.NeverSaves), frozenset({"loss"}), _saves),
    "moments named before they are there": Mutant(Actors(learner=learners.NamesWhatIsNotThere), frozenset("9"), _saves),
    "never tries again": Mutant(
        _books(learners.NeverTriesAgain),
        frozenset({"liveness"}),
        lambda options: options.nemesis_events == (SLOW_LINK,),
    ),
    "left without draining": Mutant(Actors(learner=learners.LeavesAtOnce), frozenset({"loss"}), _suffers("leave")),
}
MUTANTS = OF_THE_LOG | OF_COLLECTORS | OF_SYNCERS | OF_LEARNERS


def seeds() -> dict[str, int]:
    found: dict[str, int] = json.loads(SEEDS.read_text())
    return found


def main() -> None:
    known = seeds()
    for name, mutant in MUTANTS.items():
        if name in known and mutant.is_shown_by(known[name]):
            continue
        fitting = (seed for seed in range(WITHIN_SEEDS) if mutant.needs(drawn_options(seed)))
        shown = next((seed for seed in fitting if mutant.is_shown_by(seed)), None)
        print(f"{name}: {known.get(name)} -> {shown}", flush=True)
        known = {one: seed for one, seed in known.items() if one in MUTANTS and one != name}
        known |= {} if shown is None else {name: shown}
        SEEDS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
