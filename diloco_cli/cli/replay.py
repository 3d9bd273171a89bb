"""`diloco replay TAPE`: plays a tape on this one process, and says whether the run comes out as recorded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco_cli.cli import complete
from diloco_cli.cli.consent import AllowCode, AllowStore, named_here
from diloco_cli.cli.export import refuse_place, writing_to
from diloco_cli.cli.output import print_json, talk
from diloco_cli.clock import monotonic_s
from diloco_cli.errors import DataCheckError

if TYPE_CHECKING:
    from diloco_cli.protocol.log.tape import Tape
    from diloco_cli.tapes.player import PlayedMerge


def replay(
    tape_file: Path = typer.Argument(..., metavar="TAPE", help="From `diloco export RUN --tape TAPE`."),
    output: Path | None = typer.Option(None, "-o", "--output", help="File for the parameters at the end."),
    device: str = typer.Option("cpu", "--device", help="Where to compute.", autocompletion=complete.devices),
    dry_run: bool = typer.Option(False, "-n", "--dry-run", help="Say what is on the tape; play nothing."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object at the end."),
    initial: Path | None = typer.Option(
        None, "--initial", metavar="FILE", help="The safetensors file of a run that began with pretrained weights."
    ),
    allow_code: list[str] = AllowCode,
    allow_store: list[str] = AllowStore,
) -> None:
    """Play a tape on this one process; exit status 11 if a merge gives other parameters than the tape knows."""
    from diloco_cli.tapes.files import read_tape

    tape = read_tape(tape_file)
    if output is not None:
        refuse_place(output, hint="give another -o FILE")
    for warning in _warnings(tape, device):
        talk(f"warning: {warning}")
    if dry_run:
        _say_tape(tape, tape_file, as_json)
        return
    from diloco_cli.runtime.consent import consented

    run = consented(tape.run, str(tape_file), named_here(allow_code, allow_store))
    sys.exit(_play(replace(tape, run=run), tape_file, initial, output, device, as_json))


def _play(tape: Tape, path: Path, initial: Path | None, output: Path | None, device: str, as_json: bool) -> int:
    from diloco_cli.syncer.versions import save_parameters
    from diloco_cli.tapes.player import Player
    from diloco_cli.tasks.weights import given_values
    from diloco_cli.training.devices import choose_device

    started_s, different = monotonic_s(), None
    player = Player(tape, device=choose_device(device), values=given_values(tape.run.settings, initial))
    for merge in player.merges():
        if not as_json:
            print(_merge_line(merge, tape), flush=True)
        if not merge.as_recorded:
            different = merge
            break
    error = None if different is None else _difference(different, path)
    loss = player.final_loss() if error is None else None
    if output is not None and error is None:
        metadata = {"run": tape.run.name, "run_id": tape.run.run_id, "replayed": str(player.played), "format": "pt"}
        with writing_to(output):
            save_parameters(player.outer_parameters(), output, metadata)
    compared = any(merge.state_digest is not None for merge in tape.merges)
    bit_for_bit = error is None if compared else None  # None: the tape knows no digests
    data = _facts(tape, path) | {
        "merges_played": player.played, "loss": loss, "bit_for_bit": bit_for_bit,
        "differs_at": None if different is None else different.n, "wall_s": round(monotonic_s() - started_s, 3),
        "output": None if output is None or error is not None else str(output),
    }  # fmt: skip
    if as_json:
        print_json("replay", data, error=error)
        return 0 if error is None else error.exit_status
    if error is not None:
        raise error
    _say_end(tape, data)
    return 0


def _merge_line(merge: PlayedMerge, tape: Tape) -> str:
    known = "" if merge.expected is None else "  as recorded" if merge.as_recorded else "  DIFFERENT"
    learners, target = len(merge.losses), tape.run.settings.train.tokens
    what = f"merge {merge.n}  slot {merge.slot}  fragment {merge.fragment}  learners {learners}"
    loss = sum(merge.losses) / learners
    return f"{what}  tokens {merge.tokens:,} / {target:,}  train loss {loss:.4f}{known}"


def _difference(merge: PlayedMerge, path: Path) -> DataCheckError:
    return DataCheckError(
        f"merge {merge.n} (slot {merge.slot}, fragment {merge.fragment}) gives {merge.state_digest}, and the tape says"
        f" {merge.expected}",
        where=str(path),
        hint="bit for bit holds on the same kind of machine, torch and code of the model; `diloco verify RUN` checks"
        " the merges from the recorded deltas",
    )


def _facts(tape: Tape, path: Path) -> dict[str, Any]:
    steps = sum(event.count for track in tape.tracks for event in track.events if event.kind == "steps")
    return {
        "tape": str(path),
        "run": tape.run.name,
        "learners": len({track.learner for track in tape.tracks}),
        "incarnations": len(tape.tracks),
        "steps": steps,
        "merges": len(tape.merges),
        "merges_with_digest": sum(merge.state_digest is not None for merge in tape.merges),
        "tokens": tape.merges[-1].tokens if tape.merges else 0,
    }


def _say_tape(tape: Tape, path: Path, as_json: bool) -> None:
    facts = _facts(tape, path)
    if as_json:
        print_json("replay", facts | {"dry_run": True})
        return
    compared = f"{facts['merges_with_digest']} with a digest to compare"
    print(f"tape of run {facts['run']}: {facts['merges']} merges ({compared}), {facts['tokens']:,} merged tokens")
    for track in tape.tracks:
        steps = sum(event.count for event in track.events if event.kind == "steps")
        sends = sum(event.kind == "sent" for event in track.events)
        restored = "" if track.inner_step is None else f", moments of step {track.inner_step} restored"
        ranks = "" if track.ranks == 1 else f", {track.ranks} ranks"
        print(f"  {track.learner} incarnation {track.incarnation}: steps {steps:,}, offers {sends:,}{ranks}{restored}")


def _say_end(tape: Tape, data: dict[str, Any]) -> None:
    compared = data["merges_with_digest"]
    verdict = f"bit for bit: {compared} of {data['merges']} merges compared, all as recorded"
    print(verdict if compared else "the tape knows no digests: nothing to compare")
    print(f"held-out loss {data['loss']:.4f} after {data['tokens']:,} merged tokens, {data['wall_s']:.1f} s")
    if data["output"] is not None:
        print(f"{data['output']}: {tape.run.layout.num_parameters:,} parameters")


def _warnings(tape: Tape, device: str) -> list[str]:
    """What differs here from where the tape was recorded, so that the parameters will not be the same bits."""
    if all(merge.state_digest is None for merge in tape.merges):
        return []
    islands, found = tape.run.all_islands, []
    kinds = sorted({i.accelerator for i in islands if not i.accelerator.lower().startswith("cpu")})
    if kinds and device == "cpu":
        found.append(f"recorded on {', '.join(kinds)}: on a CPU the parameters will not be the same bits; see --device")
    counts = {track.learner: {t.ranks for t in tape.tracks if t.learner == track.learner} for track in tape.tracks}
    ranked = [f"{name} ({' and '.join(map(str, sorted(seen)))})" for name, seen in counts.items() if seen != {1}]
    if ranked:
        found.append(
            f"recorded by several ranks of {', '.join(ranked)}: one process adds the gradients up in another order, and"
            " the parameters will not be the same bits"
        )
    resized = [i.name for i in islands if not counts.get(i.name, {i.ranks}) <= {i.ranks}]
    if resized:
        found.append(
            f"{', '.join(resized)} had other numbers of ranks than planned, and so micro-batches of another size:"
            " experts, whose balance is that of a micro-batch, train otherwise here"
        )
    return found
