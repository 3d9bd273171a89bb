"""The mistakes that protocols of this kind are known to make, each as a mutated actor: the product has no switch for
any of them. A simulation is worth what it notices of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from diloco_cli.histories.demands import COLLECTS_BELOW
from diloco_cli.histories.options import Options
from diloco_cli.histories.outcome import Actors
from diloco_cli.protocol.actors.progress import Progress
from diloco_cli.virtual.faulty_calls import Fault
from tests.simulation import mistaken_collectors as collectors
from tests.simulation import mistaken_learners as learners
from tests.simulation import mistaken_logs as logs
from tests.simulation import mistaken_syncers as syncers


def _books(progress: type[Progress]) -> Actors:
    return Actors(learner=learners.with_progress(progress))


@dataclass(frozen=True)
class Mistake:
    """`needs`: histories without which it cannot show, so that none is spent on the others; `broken`: invariants one of
    which must break; `walls`: it shows where wall clocks are others; `longer`: it shows only in histories that last for
    so many merges."""

    actors: Actors
    broken: frozenset[str]
    needs: Callable[[Options], bool] = lambda options: True
    walls: bool = False
    longer: int | None = None

    def lasting(self, options: Options) -> Options:
        return options if self.longer is None else replace(options, merges=self.longer)


def _disturbed_by(*kinds: str) -> Callable[[Options], bool]:
    return lambda options: any(kind in options.disturbances for kind in kinds)


def _collects(options: Options) -> bool:
    return options.kept_rounds == 1 or "collect" in options.disturbances


def _saves(options: Options) -> bool:
    return options.saves_every_rounds > 0


def _saves_and_restarts(options: Options) -> bool:
    return _saves(options) and options.learners <= 4 and _KILLS(options)


def _rolls_back_slowly(options: Options) -> bool:
    """Uploads may take so long that a rollback comes before their end."""
    slow = options.write_rate >= 0.03 and bool(SLOW & set(options.calls))
    return slow and options.learners <= 4 and _ROLLS_BACK(options)


def _outages_of_few(options: Options) -> bool:
    return options.learners <= 4 and _disturbed_by("outage", "pause")(options)


def _rebases(options: Options) -> bool:
    return options.mixing in ("rebase", "adaptive")


def _keeps_pace(options: Options) -> bool:
    """Several learners and fragments, each of which is there for nearly all merges."""
    paces = (options.local_steps, options.adoption, options.overlap) == ("measured", "on_arrival", "auto")
    return paces and 1 < options.learners <= 4 and options.fragments > 1 and not options.apart


def _collects_in_time(options: Options) -> bool:
    """Its syncer has time to collect, and what it keeps is little."""
    at_home = not options.apart and options.learners <= 4
    return at_home and options.kept_rounds == 1 and options.latency_s < COLLECTS_BELOW * options.slot_s / 8


def _damages_reads(options: Options) -> bool:
    return Fault.FLIPPED in options.calls and options.read_rate >= 0.005 and options.learners <= 4


_KILLS = _disturbed_by("kill", "kill_all", "zombie")
_ROLLS_BACK, _JOINS = _disturbed_by("rollback"), _disturbed_by("join")
LONG = 120  # merges
SLOW = {Fault.LOST_REQUEST, Fault.LOST_ANSWER, Fault.LATE, Fault.SLOW}
OF_THE_LOG: dict[str, Mistake] = {
    "commit by overwrite": Mistake(Actors(client=logs.Overwriting), frozenset("1")),
    "deleted slots": Mistake(Actors(syncer=logs.Tidy), frozenset("1")),
    "412 taken as lost": Mistake(Actors(client=logs.TakesOwnForLost), frozenset("16")),
    "ambiguous taken as success": Mistake(Actors(client=logs.TakesDoubtForSuccess), frozenset("1467")),
    "hash not checked": Mistake(Actors(syncer=logs.NoDigests), frozenset("8"), _disturbed_by("corrupt")),
    "non-finite not checked": Mistake(Actors(arithmetic=logs.Gullible), frozenset("8"), _disturbed_by("poison")),
    "no read-back": Mistake(  # a torn state in the log is missing, or stops everybody for good
        Actors(syncer=logs.NoReadBack),
        frozenset({"9", "liveness"}),
        lambda options: Fault.TORN_WRITE in options.calls and options.write_rate >= 0.1,
    ),
    "wall clock in the lease": Mistake(
        Actors(standby=logs.WallClockLease), frozenset({"12"}), lambda options: options.standbys > 0, walls=True
    ),
    "snapshot without watermarks": Mistake(Actors(syncer=logs.AlteredSnapshots), frozenset({"2", "10"})),
    "gap in a mirror": Mistake(Actors(mirror=logs.GapInTheMirror), frozenset("1"), lambda options: options.apart > 0),
}
OF_COLLECTORS: dict[str, Mistake] = {
    "collection without floor": Mistake(Actors(syncer=collectors.NoFloor), frozenset("9")),
    "moments not kept": Mistake(Actors(syncer=collectors.NoMoments), frozenset("9"), _saves),
    "no grace": Mistake(Actors(syncer=collectors.NoGrace), frozenset("9"), _collects),
    "floor at the newest snapshot": Mistake(
        Actors(syncer=collectors.FloorAtTheNewestSnapshot), frozenset("9"), _collects
    ),
    "floor at the head": Mistake(Actors(syncer=collectors.FloorAtTheHead), frozenset("9"), _collects),
    "nothing is deleted": Mistake(
        Actors(syncer=syncers.NeverDeletes), frozenset({"bucket"}), _collects_in_time, longer=LONG
    ),
}
OF_SYNCERS: dict[str, Mistake] = {
    "no dedupe": Mistake(Actors(syncer=logs.NoDedupe), frozenset("2")),
    "watermark per learner": Mistake(Actors(syncer=logs.WatermarkPerLearner), frozenset({"liveness", "10"}), _KILLS),
    "no outcomes at the end": Mistake(Actors(syncer=logs.NoLastOutcomes), frozenset("4")),
    "refusals not told": Mistake(Actors(syncer=logs.NoRefusals), frozenset({"4", "liveness"})),
    "merged for another slot": Mistake(Actors(syncer=syncers.MergesForAnySlot), frozenset("7")),
    "merged below the quorum": Mistake(
        Actors(syncer=syncers.OneIsEnough), frozenset("5"), lambda options: options.quorum > 1
    ),
    "merged without waiting": Mistake(
        Actors(syncer=syncers.NoPatience), frozenset({"liveness"}), _keeps_pace, longer=LONG
    ),
    "not re-anchored": Mistake(Actors(arithmetic=syncers.NotReanchored), frozenset("3")),
    "momentum lost at a takeover": Mistake(Actors(arithmetic=syncers.NoMomentum), frozenset("3")),
    "one damaged read believed": Mistake(
        Actors(syncer=syncers.BelievesOneRead), frozenset({"blame"}), _damages_reads, longer=LONG
    ),
    "quarantined for being late": Mistake(
        Actors(syncer=syncers.KeepsOutTheLate), frozenset({"blame"}), lambda options: options.learners > 1
    ),
    "relayed before its payload": Mistake(
        Actors(relay=syncers.OfferBeforePayload), frozenset("9"), lambda options: options.apart > 0
    ),
    "newcomers not read": Mistake(Actors(syncer=syncers.NoNewcomers), frozenset({"4", "liveness"}), _JOINS),
    "newcomers not answered": Mistake(
        Actors(syncer=syncers.AdmitsNobody), frozenset({"liveness"}), _JOINS, longer=LONG
    ),
}
OF_LEARNERS: dict[str, Mistake] = {
    "no incarnations": Mistake(Actors(learner=learners.NoIncarnations), frozenset("47"), _KILLS),
    "another way of states": Mistake(
        Actors(learner=learners.TrainsOnAfterLeaving), frozenset({"exit"}), _disturbed_by("leave")
    ),
    "listing trusted": Mistake(Actors(learner=learners.LooksForTheNewest), frozenset("6")),
    "data dropped silently": Mistake(Actors(learner=learners.DropsSilently), frozenset({"4", "drift"})),
    "data counted twice": Mistake(
        Actors(learner=learners.CountsTwice), frozenset({"4", "liveness"}), lambda options: options.mixing == "replace"
    ),
    "no drift bound": Mistake(_books(learners.Boundless), frozenset({"drift"})),
    "waits for its outcome": Mistake(Actors(learner=learners.WaitsForItsOutcome), frozenset({"pace"})),
    "waits for the store": Mistake(Actors(learner=learners.WaitsForTheStore), frozenset({"pace"})),
    "partial batches taken for full": Mistake(_books(learners.FullBatches), frozenset("4"), _disturbed_by("partial")),
    "more steps than made": Mistake(_books(learners.MoreSteps), frozenset("4")),
    "no bound on what a fragment holds": Mistake(_books(learners.Unlimited), frozenset({"blame", "loss"})),
    "a fragment never offered": Mistake(
        _books(learners.LeavesOneOut), frozenset({"liveness"}), _keeps_pace, longer=LONG
    ),
    "late every time": Mistake(_books(learners.LateEveryTime), frozenset({"liveness"})),
    "residual of another offer": Mistake(
        _books(learners.FeedsBackTheNewest), frozenset("4"), lambda options: options.feedback
    ),
    "base not the one it was made from": Mistake(_books(learners.NamesTheNewestBase), frozenset("6")),
    "offer before its payload": Mistake(Actors(learner=learners.OfferFirst), frozenset("9")),
    "older version adopted": Mistake(
        Actors(learner=learners.AdoptsOlderVersions), frozenset("6"), _outages_of_few, longer=LONG
    ),
    "rebase keeps what was merged": Mistake(Actors(learner=learners.KeepsWhatWasMerged), frozenset("4"), _rebases),
    "rebase counts what was merged": Mistake(_books(learners.CountsFromTheAdoption), frozenset({"liveness"}), _rebases),
    "uploads dropped at a rollback": Mistake(
        Actors(learner=learners.DropsUploads),
        frozenset({"4", "liveness", "loss"}),
        _rolls_back_slowly,
        longer=LONG // 3,
    ),
    "rollback not heard": Mistake(_books(learners.DeafToRollbacks), frozenset("46"), _ROLLS_BACK),
    "moments of what was left behind": Mistake(Actors(learner=learners.MomentsOfAfter), frozenset("6"), _ROLLS_BACK),
    "moments of another incarnation": Mistake(
        Actors(learner=learners.FirstMoments), frozenset({"loss"}), _saves_and_restarts, longer=LONG
    ),
    "moments never saved": Mistake(Actors(learner=learners.NeverSaves), frozenset({"loss"}), _saves),
    "moments named before they are there": Mistake(
        Actors(learner=learners.NamesWhatIsNotThere), frozenset("9"), _saves
    ),
    "left without draining": Mistake(
        Actors(learner=learners.LeavesAtOnce), frozenset({"loss"}), _disturbed_by("leave")
    ),
}
MISTAKES = OF_THE_LOG | OF_COLLECTORS | OF_SYNCERS | OF_LEARNERS
