"""The exchange behind the training loop: one thread uploads, one follows the log. Training never waits for the store.

training thread                  uploader                        follower
send(draft, parameters) ----->   delta, codec, digest,
                                 payload, offer
heads(), arrivals()     <-----------------------------------     commit n+1, casts, beats, fences
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from diloco_cli.algorithm.codecs import codec
from diloco_cli.algorithm.delta import delta_formats
from diloco_cli.algorithm.payload import to_bytes
from diloco_cli.clock import monotonic_s, sleep_s, utc_now_text
from diloco_cli.digests import digest
from diloco_cli.errors import DilocoError, FencedError
from diloco_cli.learner.moments import SavedMoments, fetch_moments
from diloco_cli.learner.residuals import Residuals
from diloco_cli.processes.daemon import say
from diloco_cli.protocol.beats import LearnerBeat
from diloco_cli.protocol.driver import Clock, perform
from diloco_cli.protocol.joining import News, follow, newer_incarnation, publish
from diloco_cli.protocol.keys import beat_key, inner_key
from diloco_cli.protocol.mixing import keeps_progress
from diloco_cli.protocol.polling import expected_slot_s, fence_check_every_s, next_request_s
from diloco_cli.protocol.progress import Draft, Progress
from diloco_cli.protocol.quorum import moving_average
from diloco_cli.protocol.records import Output, RunFormat, Timings
from diloco_cli.protocol.sizes import most_moments_bytes
from diloco_cli.protocol.state import RunState
from diloco_cli.protocol.training import is_over
from diloco_cli.protocol.wire import encode
from diloco_cli.randomness import nonce
from diloco_cli.store.port import Store

BEAT_EVERY_S = 3.0
SLEEP_BOUNDS_S = (0.02, 0.5)


@dataclass(frozen=True)
class Arrival:
    """A committed version, decoded: [n] float32, and when this process first knew of it."""

    output: Output
    values: torch.Tensor
    known_s: float


@dataclass(frozen=True)
class Upload:
    """A delta on its way: `values` are the parameters at the moment of sending, [n] float32."""

    draft: Draft
    base: torch.Tensor
    values: torch.Tensor
    loss: float | None


class Exchange:
    """Owned by the training thread; everything that waits happens on the other two."""

    def __init__(
        self, run: RunFormat, progress: Progress, state: RunState, store: Store, clock: Clock,
        beat: Callable[[], LearnerBeat],
    ) -> None:  # fmt: skip
        self.run, self.progress = run, progress
        self._store, self._clock, self._beat = store, clock, beat
        sync = run.settings.sync
        self._residuals = Residuals(codec(sync.codec), sync.error_feedback, delta_formats(run.layout, sync))
        self._cast_codec = codec(run.settings.sync.broadcast)
        self._uploads: queue.Queue[Upload | tuple[int, dict[str, torch.Tensor]] | None] = queue.Queue()
        self._arrivals: dict[int, Arrival] = {}
        self._lock = threading.Lock()
        self._bases: dict[int, torch.Tensor] = {}
        self._sent: dict[int, dict[int, torch.Tensor]] = {f: {} for f in range(run.num_fragments)}
        self._fetched = {output.fragment: output.version for output in state.outputs}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.state = state
        self.news = threading.Event()
        self._step_s = self._upload_s = self._adoption_s = 0.0
        self._slot_s = progress.island.local_steps * progress.island.step_s / run.num_fragments
        self.moments = SavedMoments()
        self.trouble = ""
        self.uploading = False

    # -- called by the training thread --------------------------------------------------------------------------

    def load_all(self) -> list[Arrival]:
        """The newest committed version of every fragment: what a new incarnation starts from. Not of every one, if the
        run ends while some cannot be read."""
        self._fetched = dict.fromkeys(self._fetched, -1)
        arrivals: dict[int, Arrival] = {}
        joined_at = self.state.n
        while True:
            news = perform(follow(self.run, self.state, self._fetched, self._decoded), self._store, self._clock)
            self.state = news.state
            arrivals |= {output.fragment: Arrival(output, values, monotonic_s()) for output, values in news.casts}
            self._fetched |= {output.fragment: output.version for output, _ in news.casts}
            if not news.missing or is_over(news.state, joined_at):
                break
            self._tell_of(news)
            self._clock.sleep_s(SLEEP_BOUNDS_S[1])  # collected meanwhile, perhaps: the log names newer ones by then
        self.trouble = ""
        return [arrivals[fragment] for fragment in sorted(arrivals)]

    def start(self) -> None:
        for target in (self._upload_loop, self._follow_loop):
            thread = threading.Thread(target=self._guarded, args=(target,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def arrivals(self) -> tuple[list[Arrival], RunState]:
        """The newest of each fragment that has arrived since the last call, and the log that they belong to. Raises
        what ended a background thread."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            arrived, self._arrivals = self._arrivals, {}
            return [arrived[fragment] for fragment in sorted(arrived)], self.state

    def adopted(self, arrival: Arrival) -> None:
        self._bases[arrival.output.fragment] = arrival.values
        self._sent[arrival.output.fragment] = {}
        delay_s = monotonic_s() - arrival.known_s
        self._adoption_s = moving_average(self._adoption_s or None, delay_s)

    @property
    def timings(self) -> Timings:
        """Each average is written by one thread alone."""
        return Timings(self._step_s, self._slot_s, self._upload_s, self._adoption_s)

    def has_base(self, fragment: int) -> bool:
        return fragment in self._bases

    def sent_values(self, fragment: int, draft: Draft | None) -> torch.Tensor:
        """The parameters as they were sent with `draft`; without one, as they were adopted. [n] float32."""
        return self._bases[fragment] if draft is None else self._sent[fragment][draft.seq]

    def step_took(self, seconds: float) -> None:
        """A slow average: one step's time is noisy, and H_i follows it."""
        self._step_s += 0.05 * (seconds - self._step_s) if self._step_s else seconds

    def slot_took(self, seconds: float) -> None:
        self._slot_s = moving_average(self._slot_s or None, seconds)

    def send(self, draft: Draft, values: torch.Tensor, loss: float | None) -> None:
        """Offer fragment values [n] float32 against the base adopted last; returns at once."""
        if keeps_progress(self.run.settings.sync):
            self._sent[draft.fragment][draft.seq] = values
        self._uploads.put(Upload(draft, self._bases[draft.fragment], values, loss))

    def save_inner(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the inner optimizer's state in the background; later offers name it."""
        self._uploads.put((self.progress.log_n, tensors))

    def moments_before_rollback(self, state: RunState) -> bytes | None:
        """The newest that this process saved before what the log's rollback went behind; None if there are none."""
        key = self.moments.go_back(state.rolled_back_to, state.base_floor)
        return fetch_moments(self._store, key, most_moments_bytes(self.run.layout))

    def close(self, timeout_s: float) -> None:
        """Let the uploader finish what it has, within `timeout_s`; then both threads end."""
        self._uploads.put(None)
        self._threads[0].join(timeout_s)
        self._stop.set()
        self._threads[1].join(timeout_s)
        if isinstance(self._failure, FencedError):
            return  # the successor's beat is there now
        with suppress(DilocoError):  # a last word; nothing depends on it
            self._store.put(beat_key(self.progress.learner), encode(self._beat()))

    # -- the uploader -------------------------------------------------------------------------------------------

    def _upload_loop(self) -> None:
        while not self._stop.is_set():
            job = self._uploads.get()
            if job is None:
                return
            self.uploading = True
            if isinstance(job, Upload):
                self._upload(job)
            else:
                self._upload_inner(*job)
            self.uploading = not self._uploads.empty()

    def _upload(self, job: Upload) -> None:
        started_s = monotonic_s()
        draft = job.draft
        payload = self._residuals.encode(
            draft.fragment, draft.seq, draft.applied, job.base - job.values, draft.pending
        )  # fmt: skip
        offer = self.progress.offer(
            job.draft, digest(payload), len(payload), nonce(), self.timings, job.loss, self.moments.newest
        )
        perform(publish(offer, payload, self.run.keyring), self._store, self._clock)
        took_s = monotonic_s() - started_s
        self._upload_s = moving_average(self._upload_s or None, took_s)

    def _upload_inner(self, log_n: int, tensors: dict[str, torch.Tensor]) -> None:
        data = to_bytes(tensors)
        key = inner_key(self.progress.learner, self.progress.incarnation, int(tensors["step"][0]), digest(data))
        self._store.create(key, data)
        self.moments.add(key, log_n)

    # -- the follower -------------------------------------------------------------------------------------------

    def _follow_loop(self) -> None:
        next_beat_s = next_fence_s = next_look_s = monotonic_s()
        found_s: float | None = None
        while not self._stop.is_set():
            now_s = monotonic_s()
            if now_s >= next_beat_s:
                next_beat_s = now_s + BEAT_EVERY_S
                self._store.put(beat_key(self.progress.learner), encode(self._beat()))
            if now_s >= next_fence_s:
                next_fence_s = now_s + fence_check_every_s(self._expected_slot_s())
                self._check_fence()
            if now_s >= next_look_s:
                if self._follow_once(now_s):
                    found_s = next_look_s = monotonic_s()
                    continue
                known_s = None if self.trouble else found_s  # what is missing may be there again at any time
                next_look_s = next_request_s(known_s, now_s, self._expected_slot_s())
            low, high = SLEEP_BOUNDS_S
            sleep_s(min(high, max(low, next_look_s - monotonic_s())))

    def _expected_slot_s(self) -> float:
        """As measured, but no multiple of what its steps take: after any pause the log is heard soon."""
        of_steps = self._step_s * self.progress.local_steps / self.run.num_fragments
        return expected_slot_s(self._slot_s, of_steps) if of_steps else self._slot_s

    def _follow_once(self, now_s: float) -> bool:
        """Read what is new in the log and fetch what it brings; False if nothing is."""
        found = perform(follow(self.run, self.state, self._fetched, self._decoded), self._store, self._clock)
        arrived = [Arrival(output, values, now_s) for output, values in found.casts]
        news = found.state.n > self.state.n
        with self._lock:
            self.state = found.state
            self._arrivals |= {arrival.output.fragment: arrival for arrival in arrived}
        self._fetched |= {arrival.output.fragment: arrival.output.version for arrival in arrived}
        self._tell_of(found)
        if news:
            self.news.set()
        return news

    def _tell_of(self, news: News) -> None:
        """In the beat, and once in this unit's log: which version cannot be had. Its successor ends the trouble."""
        gone = [f"version {output.version} of fragment {output.fragment} cannot be read" for output in news.missing]
        before, self.trouble = self.trouble, ", ".join(gone[:1])
        if self.trouble and self.trouble != before:
            say(f"{utc_now_text()} {self.progress.learner}: {self.trouble}; waits for its successor")

    def _decoded(self, output: Output, data: bytes) -> torch.Tensor:
        return self._cast_codec.from_bytes(data, self.run.layout.fragments[output.fragment].num_parameters)

    def _check_fence(self) -> None:
        learner, incarnation = self.progress.learner, self.progress.incarnation
        if perform(newer_incarnation(learner, incarnation, self.run.keyring), self._store, self._clock):
            raise FencedError(f"a newer process has taken the place of incarnation {incarnation} of {learner}")

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # handed to the training thread, which raises it
            self._failure = error
            self.news.set()
