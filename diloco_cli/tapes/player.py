"""Plays a tape on one process: the product's own replicas, codecs, merges and outer steps, in the tape's order.

    for merge in Player(tape).merges(): ...

The same tape gives the same parameters bit for bit, with any timing of the run or of the replay, on the same kind of
machine with the same torch. In memory: a replica per learner, and the deltas and versions that are still needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from diloco_cli.digests import digest
from diloco_cli.errors import RunFailedError, UsageError
from diloco_cli.protocol.actors.ports import Merged, Refused
from diloco_cli.protocol.log.records import Offer, OfferId, TapeEvent
from diloco_cli.protocol.log.tape import Tape, TapeMerge
from diloco_cli.syncer.arithmetic import TorchArithmetic
from diloco_cli.syncer.evaluation import FINAL_FACTOR, held_out_loss
from diloco_cli.tapes.needs import Save, TrackId, needs_of, save_restored
from diloco_cli.tapes.performer import Performer, Sent, TapeWorld, Versions
from diloco_cli.tasks.build import Data, build_data, build_model
from diloco_cli.tasks.weights import Values
from diloco_cli.tensors.flat import unflatten
from diloco_cli.tensors.merge import DeltaSource
from diloco_cli.tensors.names import bare_parameters
from diloco_cli.training.inner import restore_inner_state
from diloco_cli.training.replica import CPU, Replica


@dataclass(frozen=True)
class PlayedMerge:
    """The result of one merge. `losses`: of each input's learner at its send, nats per token, in the order of the
    inputs; `expected`: the digest on the tape."""

    n: int
    slot: int
    fragment: int
    tokens: int
    losses: tuple[float, ...]
    state_digest: str
    expected: str | None = None

    @property
    def as_recorded(self) -> bool:
        """False only if the tape has another digest."""
        return self.expected in (None, self.state_digest)


class Player:
    """Holds the whole run in one process. `data`: the result of build_data for the tape's settings, if already made.
    `values`: with which the run began, if they were brought."""

    def __init__(
        self, tape: Tape, *, device: torch.device = CPU, data: Data | None = None, values: Values | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.tape, self.run, self.device = tape, tape.run, device
        self.data = data if data is not None else build_data(self.run.settings)
        needs = needs_of(tape)
        self.world = TapeWorld(tape, needs, Versions(tape, needs))
        self.arithmetic = TorchArithmetic(self.run, values=values)
        self.tracks = {(track.learner, track.incarnation): track for track in tape.tracks}
        self.performers: dict[TrackId, Performer] = {}
        self.played = 0
        self._evaluated: torch.nn.Module | None = None
        self.current = [0] * self.run.num_fragments
        self.states = [b""] * self.run.num_fragments
        for fragment, merged in enumerate(self.arithmetic.initial()):
            self._settle(fragment, 0, merged)

    def merges(self) -> Iterator[PlayedMerge]:
        """Play on, merge by merge."""
        while self.played < len(self.tape.merges):
            yield self._play(self.tape.merges[self.played])

    def outer_parameters(self) -> dict[str, torch.Tensor]:
        """Every trained parameter by its name, float32, after the merges played so far."""
        fragments = self.run.layout.fragments
        tensors = {slot.name: torch.empty(slot.shape) for fragment in fragments for slot in fragment.tensors}
        for index, fragment in enumerate(fragments):
            unflatten(fragment, self.arithmetic.parameters(index), tensors)
        return tensors

    def held_out_loss(self, num_sequences: int) -> float:
        """The loss of the outer parameters, nats per token, as the syncer's evaluator computes it."""
        if self._evaluated is None:
            self._evaluated = build_model(self.run.settings).eval()
        tensors = bare_parameters(self._evaluated)
        for index, fragment in enumerate(self.run.layout.fragments):
            unflatten(fragment, self.arithmetic.parameters(index), tensors)
        return held_out_loss(self._evaluated, self.data, num_sequences)

    def final_loss(self) -> float:
        """Held-out loss as of now, on as many sequences as a run's last evaluation uses."""
        return self.held_out_loss(self.run.settings.evaluation.sequences * FINAL_FACTOR)

    def restore(self, fragment: int, state: bytes) -> None:
        """Set a fragment's outer parameters and momentum from those of another player."""
        self.arithmetic.restore(fragment, digest(state), state)
        self.states[fragment] = state

    # -- one merge ----------------------------------------------------------------------------------------------

    def _play(self, merge: TapeMerge) -> PlayedMerge:
        for offer, _ in merge.inputs:
            self._perform_until_sent(offer)
        losses = tuple(self.world.sent[offer].loss for offer, _ in merge.inputs)
        scales = merge.scales or (1.0,) * len(merge.inputs)
        deltas = [
            (self._delta(offer, merge), weight, scale)
            for (offer, weight), scale in zip(merge.inputs, scales, strict=True)
        ]
        merged = self.arithmetic.merge(merge.slot, deltas)
        if isinstance(merged, Refused):
            why = "; ".join(f"{merge.inputs[place][0]} {reason}" for place, reason in merged.reasons.items())
            raise RunFailedError(f"merge {merge.n} of this tape gives no version: {why}")
        state_digest = self._settle(merge.fragment, merge.n, merged)
        self.played += 1
        self._forget_the_done()
        return PlayedMerge(merge.n, merge.slot, merge.fragment, merge.tokens, losses, state_digest, merge.state_digest)

    def _settle(self, fragment: int, version: int, merged: Merged) -> str:
        state_digest = digest(merged.state)
        self.arithmetic.settle(fragment, state_digest)
        self.world.versions.put(fragment, version, merged.weights)
        self.current[fragment], self.states[fragment] = version, merged.state
        return state_digest

    def _delta(self, offer: OfferId, merge: TapeMerge) -> DeltaSource:
        """The delta as the syncer reads it: re-anchored if its base is not the fragment's current version."""
        sent = self.world.sent.pop(offer)
        if sent.fragment != merge.fragment:
            raise UsageError(f"this tape cannot be played: merge {merge.n} takes {offer}, which is another fragment's")
        base_weights = None
        if sent.base != self.current[merge.fragment]:
            base_weights = self.world.versions.weights(merge.fragment, sent.base)
        delta = self.arithmetic.read_delta(_as_offer(offer, sent), sent.payload, base_weights)
        self.world.versions.used(merge.fragment, sent.base)
        if isinstance(delta, str):
            raise RunFailedError(f"merge {merge.n} of this tape cannot take {offer}: {delta}")
        return delta

    # -- performing ---------------------------------------------------------------------------------------------

    def _perform_until_sent(self, offer: OfferId) -> None:
        if offer not in self.world.sent:
            learner, incarnation, seq = offer
            self._performer((learner, incarnation)).perform_until(partial(_sends, seq))

    def _performer(self, number: TrackId) -> Performer:
        """The track's performer. If the track begins with moments that are not saved yet, the tracks that save them are
        performed first, the oldest one before the others."""
        missing: list[Save] = []
        save = save_restored(self.tracks[number]) if number not in self.performers else None
        while save is not None and save not in self.world.saved:
            missing.append(save)
            source = save[:2]
            save = save_restored(self.tracks[source]) if source not in self.performers else None
        for learner, incarnation, step in reversed(missing):
            self._begin((learner, incarnation)).perform_until(partial(_saves, step))
        return self._begin(number)

    def _begin(self, number: TrackId) -> Performer:
        if number not in self.performers:
            self.performers[number] = self._new_performer(number)
        return self.performers[number]

    def replica_of(self, learner: str) -> Replica:
        """A fresh replica, as the learner's process builds it."""
        run, island = self.run, self.run.island(learner)
        model, micro = build_model(run.settings).to(self.device), island.micro_batch_tokens if island else None
        return Replica(run.settings, model, self.data, run.shard_of(learner), run.num_shards, self.device, micro)

    def _new_performer(self, number: TrackId) -> Performer:
        track = self.tracks[number]
        replica = self.replica_of(track.learner)
        save = save_restored(track)
        if save is not None:
            if not restore_inner_state(replica.model, replica.optimizer, self.world.saved[save]):
                raise UsageError(f"this tape cannot be played: the moments {save} cannot be restored")
            self.world.needs.saves[save] -= 1
            if self.world.needs.saves[save] == 0:
                del self.world.saved[save]
        return Performer(self.world, track, replica)

    def _forget_the_done(self) -> None:
        """Free the performers whose track has been performed to its last needed event."""
        until = self.world.needs.until
        for number in [n for n, performer in self.performers.items() if performer.cursor >= until[n]]:
            del self.performers[number]


def _as_offer(offer: OfferId, sent: Sent) -> Offer:
    """The offer's fields that the arithmetic needs; tokens, steps and data are in the merge's weight already."""
    learner, incarnation, seq = offer
    return Offer(
        learner, incarnation, seq, sent.slot, sent.fragment, sent.base, base_digest="", data_start=0, data_end=0,
        tokens=0, steps=0, payload_digest="", payload_bytes=len(sent.payload), nonce="",
    )  # fmt: skip


def _sends(seq: int, event: TapeEvent) -> bool:
    return event.kind == "sent" and event.seq == seq


def _saves(step: int, event: TapeEvent) -> bool:
    return event.kind == "saved" and event.count == step
