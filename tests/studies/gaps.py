"""What a fault costs the others, and what becomes of every token: python -m tests.studies.gaps [--mixing rebase]

Three real learners, a syncer and their supervisor (`diloco launch`), on a model of a few numbers whose steps take their
time. One run without a fault, then one for each: a learner is killed, a learner's steps take ten times as long from
there on, the syncer is killed, the syncer stays dead for 20 s. A run goes on until its tokens are merged.

    gap      the longest time between two merges that one of the others takes part in (of the syncer's faults: anybody)
    trained  what the learners' processes have written down themselves, step by step; of each of these steps the bucket
             must tell what became of it, in the mean over the fragments:
    merged   it is in a version
    late     it was in an offer that missed its slot
    refused  it was in an offer with another outcome, or with none when the run ended
    given up it was in no offer, for an adoption took its place
    unsent   it came after its process's last offer: all that the bucket does not tell; a round and what is on its way

Ends with the table of README.md, and with status 1 if a step is not accounted for or `verify` finds anything.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from diloco_cli.protocol.log.commits import Commit
from diloco_cli.protocol.log.keys import offer_key
from diloco_cli.protocol.log.records import Mixing, Offer, OfferId
from diloco_cli.protocol.log.wire import decode
from diloco_cli.store.port import Store
from tests.studies.attendance import gaps_s
from tests.studies.launched import BATCH_TOKENS, NAME, LaunchedRun, inventory_of, lived, toy_file
from tests.studies.toy_runs import FRAGMENTS, LEARNERS
from tests.studies.verifying import problems_of

LOCAL_STEPS, STEP_S = 20, 0.1
ROUNDS = 24
STRUCK_AFTER_ROUNDS = 8
DEAD_S = 20.0
VICTIM, SYNCER = LEARNERS[-1], "syncer"
LIMIT_S = 600.0
MAX_INCARNATIONS = 20
MAX_UNSENT_ROUNDS = 5  # of each process: the drift bound, up to which it steps while the last evaluation runs; and one
FAULTS = ("none", "a learner killed", "a learner 10x slower", "the syncer killed", f"the syncer dead for {DEAD_S:g} s")
HEADER = (
    "| mixing | fault | merges | others' longest gap | / healthy | steps trained | merged | late | refused | given up "
    "| unsent | of the victim's: merged | violations |\n" + "|---" * 13 + "|"
)

Steps = Counter[tuple[str, int]]
"""Of steps: the learner and the position at which they begin; more than one where an incarnation went there again."""


def run_file(directory: Path, rounds: int, mixing: Mixing, step_s: float) -> str:
    tokens = len(LEARNERS) * rounds * LOCAL_STEPS * BATCH_TOKENS
    model = ("witnessed_model", {"elements": 16, "journal": str(directory / "journal")})
    data = ("slow_positions", {"step_s": step_s, "slowed": str(directory / "slowed")})
    sync = {"every": LOCAL_STEPS, "fragments": FRAGMENTS, "mixing": mixing}
    return toy_file(model, data, tokens, sync, retention={"rounds": "all"})


class WatchedRun(LaunchedRun):
    """A launched run whose learners keep a journal, and who can be slowed down."""

    def __init__(self, directory: Path, rounds: int, mixing: Mixing, step_s: float = STEP_S) -> None:
        (directory / "journal").mkdir()
        super().__init__(directory, run_file(directory, rounds, mixing, step_s), inventory_of(LEARNERS))

    def commits(self) -> list[Commit]:
        return [decode(Commit, data, name) for name, data in self.log().items()]

    def chaos(self, *words: str) -> None:
        """`diloco chaos`, as a user would."""
        command = [sys.executable, "-m", "diloco_cli", "chaos", *words, "--run", NAME]
        subprocess.run(command, cwd=self.directory, env=self.environment, check=True, capture_output=True)

    def slow_down(self, learner: str) -> None:
        (self.directory / "slowed").write_text(str(self.run.shard_of(learner)))

    def wait_for_merges(self, merges: int) -> None:
        self.wait(lambda: sum(commit.kind == "merge" for commit in self.commits()) >= merges, LIMIT_S)

    def journal(self) -> Steps:
        """What the processes say that they trained."""
        files = sorted((self.directory / "journal").iterdir())
        return Counter((path.name.partition(".")[0], int(line)) for path in files for line in path.read_text().split())

    def processes(self) -> int:
        """That have trained."""
        return len(list((self.directory / "journal").iterdir()))


def strike(run: WatchedRun, fault: str) -> None:
    match FAULTS.index(fault):
        case 1:
            run.chaos("kill", VICTIM)
        case 2:
            run.slow_down(VICTIM)
        case 3:
            run.chaos("kill", SYNCER)
        case 4:
            run.chaos("kill", SYNCER, "--hold")
            time.sleep(DEAD_S)
            run.chaos("revive", SYNCER)


# -- gaps -------------------------------------------------------------------------------------------------------------


def max_gap_s(commits: Sequence[Commit], learners: Iterable[str]) -> float:
    """Between two merges that the same learner takes part in, of these learners, once all have taken part together."""
    merges = [commit for commit in commits if commit.kind == "merge"]
    together = next((i for i, commit in enumerate(merges) if len(commit.inputs) == len(LEARNERS)), len(merges))
    gaps = (gaps_s([commit for commit in merges[together:] if takes_part(name, commit)]) for name in learners)
    return max(chain.from_iterable(gaps), default=0.0)


def takes_part(name: str, commit: Commit) -> bool:
    return any(item.learner == name for item in commit.inputs)


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass
class StepAccount:
    """Steps by what became of them, in the mean over fragments; `told`: all of which the bucket tells."""

    told: Steps = field(default_factory=Counter)
    merged: float = 0.0
    late: float = 0.0
    refused: float = 0.0
    given_up: float = 0.0


def account(offers: Sequence[Offer], commits: Sequence[Commit], learners: Iterable[str]) -> StepAccount:
    """Of these learners' steps, from the bucket alone."""
    applied = {(item.learner, item.incarnation, item.seq) for commit in commits for item in commit.inputs}
    outcomes = {(f.learner, f.incarnation, f.seq): f.reason for commit in commits for f in commit.outcomes}
    found, whole = StepAccount(), Counter[str]()
    for name, incarnation in sorted({(o.learner, o.incarnation) for o in offers if o.learner in set(learners)}):
        own = [offer for offer in offers if (offer.learner, offer.incarnation) == (name, incarnation)]
        told = steps_told(own)
        found.told.update((name, position) for position in told)
        for fragment in range(FRAGMENTS):
            of_fragment = [offer for offer in own if offer.fragment == fragment]
            left = set(told)
            for outcome in ("merged", "late", "refused"):
                taken = steps_of(offer for offer in of_fragment if outcome_of(offer.id, applied, outcomes) == outcome)
                whole[outcome] += len(taken & left)
                left -= taken
            whole["given_up"] += len(left)
    for outcome, steps in whole.items():
        setattr(found, outcome, steps / FRAGMENTS)
    return found


def outcome_of(offer: OfferId, applied: set[OfferId], outcomes: dict[OfferId, str]) -> str:
    if offer in applied:
        return "merged"
    return "late" if outcomes.get(offer) == "late" else "refused"


def steps_told(offers: Sequence[Offer]) -> list[int]:
    """Where the steps of one incarnation began: from its first offer's data to its last one's."""
    first, last = min(offer.data_start for offer in offers), max(offer.data_end for offer in offers)
    return list(range(first, last, BATCH_TOKENS))


def steps_of(offers: Iterable[Offer]) -> set[int]:
    return {position for offer in offers for position in range(offer.data_start, offer.data_end, BATCH_TOKENS)}


def read_offers(store: Store, learners: Iterable[str]) -> Iterator[Offer]:
    """All that lie in the bucket, each incarnation's in its order."""
    for name in learners:
        for incarnation in range(1, 1 + MAX_INCARNATIONS):
            for seq in count():
                data = store.get(key := offer_key(name, incarnation, seq))
                if data is None:
                    break
                yield decode(Offer, data, key)


# -- a study ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GapRow:
    """Of one run. `unsent`: trained, and the bucket does not tell of it. `of_victim`: merged of what it trained."""

    mixing: Mixing
    fault: str
    merges: int
    gap_s: float
    trained: int
    found: StepAccount
    unsent: int
    of_victim: float
    violations: tuple[str, ...]

    def text(self, healthy_s: float) -> str:
        shares = (self.found.merged, self.found.late, self.found.refused, self.found.given_up, self.unsent)
        cells = [
            self.mixing, self.fault, str(self.merges), f"{self.gap_s:.2f} s", f"{self.gap_s / healthy_s:.2f}",
            f"{self.trained:,}", *(f"{100 * share / self.trained:.1f} %" for share in shares),
            f"{100 * self.of_victim:.1f} %", "; ".join(self.violations) or "0",
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


def judge(run: WatchedRun, mixing: Mixing, fault: str) -> GapRow:
    """What a run came to that is over."""
    commits, journal = run.commits(), run.journal()
    offers = list(read_offers(run.store, LEARNERS))
    everybody, victim = account(offers, commits, LEARNERS), account(offers, commits, (VICTIM,))
    others = [name for name in LEARNERS if "learner" not in fault or name != VICTIM]
    unsent = journal - everybody.told
    return GapRow(
        mixing=mixing,
        fault=fault,
        merges=sum(commit.kind == "merge" for commit in commits),
        gap_s=max_gap_s(commits, others),
        trained=journal.total(),
        found=everybody,
        unsent=unsent.total(),
        of_victim=victim.merged / sum(times for (name, _), times in journal.items() if name == VICTIM),
        violations=tuple(problems(run, journal, everybody)),
    )


def problems(run: WatchedRun, journal: Steps, found: StepAccount) -> Iterator[str]:
    """Why a run does not count as sound."""
    replay, never = run.verified(), found.told - journal
    yield from problems_of(replay)
    if never:
        yield f"{never.total()} steps that nobody trained"
    most = run.processes() * MAX_UNSENT_ROUNDS * LOCAL_STEPS
    if (unsent := (journal - found.told).total()) > most:
        yield f"{unsent} steps of which nothing is told, where {most} may be on their way"


def study(mixing: Mixing, fault: str, rounds: int = ROUNDS, step_s: float = STEP_S) -> GapRow:
    directory = Path(tempfile.mkdtemp(prefix="gaps-"))
    with lived(WatchedRun(directory, rounds, mixing, step_s)) as run:
        run.wait_for_merges(min(STRUCK_AFTER_ROUNDS, rounds // 2) * FRAGMENTS)
        strike(run, fault)
        run.wait(run.is_over, LIMIT_S)
        return judge(run, mixing, fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixing", choices=("replace", "rebase"), help="default: both, one after the other")
    parser.add_argument("--fault", choices=FAULTS[1:], action="append", help="default: all; may be given several times")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *about: sys.exit(143))  # so that nothing that was started stays behind
    mixings: tuple[Mixing, ...] = (options.mixing,) if options.mixing else ("replace", "rebase")
    rows: list[GapRow] = []
    print(HEADER, flush=True)
    for mixing in mixings:
        healthy = study(mixing, FAULTS[0], options.rounds)
        rows.append(healthy)
        print(healthy.text(healthy.gap_s), flush=True)
        for fault in options.fault or FAULTS[1:]:
            rows.append(row := study(mixing, fault, options.rounds))
            print(row.text(healthy.gap_s), flush=True)
    sys.exit(1 if any(row.violations for row in rows) else 0)


if __name__ == "__main__":
    main()
