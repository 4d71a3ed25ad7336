"""A model of an engine with continuous batching and chunked prefill, on one GPU or one group of them.

Time passes in steps. A step gives one token to each request that decodes, and reads up to `prefill_chunk` tokens of
prompts that wait to be read (Agrawal et al. 2024, Sarathi-Serve). It takes

    pace * (decode + prefill)
    decode  = tpot_ms + tpot_batch_ms * (decoding - 1) + tpot_kv_ms * (share of the cache in use); 0 where nobody decodes
    prefill = P(to) - P(from) for each piece, P(n) = prefill_ms_per_1k * n / 1000 + prefill_quadratic_ms * (n / 1000)^2,
              and ttft_ms once, with a prompt's first piece

so that a request alone takes exactly what its profile says (`schemas.policy.ProfileConfig`). The first token comes with
the end of the prompt's last step. A request is let in while a slot is free and its prompt fits into the cache; where
the cache overflows, the youngest is put back and read again with what it had said, as vLLM does.

Nothing happens for each token: like steps are one *stretch* up to the next end of a run or a prompt; whatever comes
between cuts the stretch at the next end of a step. k steps of a stretch take head + A k + Q k^2, for the cache grows by
one token per step and request, and the quadratic cost of a long prompt telescopes.
"""

import heapq
import math
from collections import deque

from msgspec import Struct

from deploy.simulate.job import NEVER_MS, Job


class Speed(Struct, frozen=True):
    """What an engine's steps take, in milliseconds; see the module. Without `kv_tokens` the cache has no bound."""

    slots: int
    prefill_chunk: int = 512
    kv_tokens: int | None = None
    ttft_ms: float = 0.0
    prefill_ms_per_1k: float = 0.0
    prefill_quadratic_ms: float = 0.0
    tpot_ms: float = 0.0
    tpot_batch_ms: float = 0.0
    tpot_kv_ms: float = 0.0

    def prefill_ms(self, tokens: float) -> float:
        """P(n) of the module."""
        thousands = tokens / 1000
        return self.prefill_ms_per_1k * thousands + self.prefill_quadratic_ms * thousands * thousands

    def decode_ms(self, decoding: int, kv_usage: float) -> float:
        """A step's part that decodes."""
        return self.tpot_ms + self.tpot_batch_ms * (decoding - 1) + self.tpot_kv_ms * kv_usage

    def full_cost_ms(self, input_tokens: int, output_tokens: int) -> float:
        """Engine time that a request takes at least: with every slot taken by one like it, its part of all steps."""
        usage = 0.0
        if self.kv_tokens is not None:
            usage = min(1.0, self.slots * (input_tokens + output_tokens / 2) / self.kv_tokens)
        each = self.decode_ms(self.slots, usage) / self.slots
        return self.ttft_ms + self.prefill_ms(input_tokens) + (output_tokens - 1) * each


class _Stretch:
    """Steps under way that differ by the growth of the cache and the place in a prompt only."""

    __slots__ = ("chunk", "decoding", "head", "linear", "pace", "pieces", "quadratic", "since_ms", "steps")

    def __init__(self, since_ms: float, pace: float, decoding: int, steps: int) -> None:
        self.since_ms, self.pace, self.decoding, self.steps = since_ms, pace, decoding, steps
        self.chunk = 0  # tokens of the first prompt per step
        self.pieces: list[tuple[Job, int]] = []  # or what one step reads of several
        self.head = self.linear = self.quadratic = 0.0

    def ms(self, steps: int) -> float:
        return self.pace * (self.head + (self.linear + self.quadratic * steps) * steps)

    @property
    def end_ms(self) -> float:
        return self.since_ms + self.ms(self.steps)

    def steps_until(self, now_ms: float) -> int:
        """Steps that have ended or are under way at a moment: at least one."""
        wanted = (now_ms - self.since_ms) / self.pace - self.head
        if wanted <= 0:
            return 1
        if self.quadratic > 0:
            root = math.sqrt(self.linear * self.linear + 4 * self.quadratic * wanted)
            steps = math.ceil((root - self.linear) / (2 * self.quadratic))
        elif self.linear > 0:
            steps = math.ceil(wanted / self.linear)
        else:
            return self.steps
        steps = min(max(steps, 1), self.steps)
        while steps > 1 and self.since_ms + self.ms(steps - 1) >= now_ms:
            steps -= 1
        return steps


class Engine:
    """One engine. `next_ms` says when `advance` is due; it changes with each call.

    Args:
        speed: What its steps take.
    """

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.pace = 1.0  # 2: everything takes twice as long
        self.next_ms = NEVER_MS
        self.busy_ms = 0.0
        self.kv_used = 0  # tokens, as of the last end of a stretch
        self._steps = self._admitted = 0
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # last step, tie, job
        self._stretch: _Stretch | None = None

    def __len__(self) -> int:
        """Requests given and not ended."""
        return len(self._waiting) + len(self._reading) + len(self._decoding)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._reading) + len(self._decoding)

    @property
    def unread_tokens(self) -> int:
        """Tokens of prompts that are still to be read, as of the last end of a stretch."""
        return sum(job.prefill_left for job in self._reading) + sum(job.prefill_left for job in self._waiting)

    def kv_usage(self, now_ms: float) -> float:
        """Share of the cache in use at or before `next_ms`; 0 where it has no bound."""
        if not self.speed.kv_tokens:
            return 0.0
        stretch = self._stretch
        since = (stretch.steps_until(now_ms) - 1) * stretch.decoding if stretch is not None else 0
        return min(1.0, (self.kv_used + since) / self.speed.kv_tokens)

    def start(self, job: Job, now_ms: float) -> None:
        """Take a request in.

        Args:
            job: One whose prompt and answer fit into the cache together.
            now_ms: At or before `next_ms`.
        """
        job.prefill_left, job.read = job.input_tokens + job.made, 0
        self._waiting.append(job)
        stretch = self._stretch
        if stretch is None:
            self._begin(now_ms)
        elif self.running < self.speed.slots:
            self._cut(now_ms)

    def set_pace(self, pace: float, now_ms: float) -> None:
        """Change how fast it is, from the next step on."""
        self.pace = pace
        self._cut(now_ms)

    def advance(self) -> list[Job]:
        """Come to the end of the stretch.

        Returns:
            What ended with it.
        """
        stretch = self._stretch
        if stretch is None:
            return []
        now_ms, ended = stretch.end_ms, []
        self.busy_ms += now_ms - stretch.since_ms
        self._steps += stretch.steps
        self.kv_used += stretch.decoding * stretch.steps
        while self._decoding and self._decoding[0][0] <= self._steps:
            ended.append(self._end(heapq.heappop(self._decoding)[2], now_ms))
        pieces = stretch.pieces or ([(self._reading[0], stretch.chunk * stretch.steps)] if stretch.chunk else [])
        for job, tokens in pieces:
            job.read += tokens
            job.prefill_left -= tokens
            if not job.prefill_left:
                self._reading.popleft()  # prompts end in the order in which they are read
                if self._first_token(job, now_ms):
                    ended.append(self._end(job, now_ms))
        self._begin(now_ms)
        return ended

    def clear(self, now_ms: float) -> list[Job]:
        """Die: give what was on it, the oldest first."""
        if self._stretch is not None:
            self.busy_ms += now_ms - self._stretch.since_ms
        lost = [*self._reading, *(entry[2] for entry in self._decoding)]
        lost.sort(key=lambda job: job.admitted)
        lost += self._waiting
        for held in (self._waiting, self._reading, self._decoding):
            held.clear()
        self.kv_used, self._stretch, self.next_ms = 0, None, NEVER_MS
        return lost

    # -- what happens at the end of a stretch ------------------------------------------------------------------------

    def _first_token(self, job: Job, now_ms: float) -> bool:
        """A prompt was read; whether that was all."""
        self.kv_used += 1
        job.made += 1
        if job.first_ms == NEVER_MS:
            job.first_ms = now_ms
        if job.made >= job.output_tokens:
            return True
        job.due_step = self._steps + job.output_tokens - job.made
        heapq.heappush(self._decoding, (job.due_step, job.admitted, job))
        return False

    def _end(self, job: Job, now_ms: float) -> Job:
        job.made = job.output_tokens
        job.end_ms = now_ms
        self.kv_used -= job.input_tokens + job.output_tokens
        return job

    def _admit(self) -> None:
        """Let in who waits, in order, while slots and cache allow."""
        waiting, limit = self._waiting, self.speed.kv_tokens
        while waiting and self.running < self.speed.slots:
            job = waiting[0]
            if limit is not None and self.running and self.kv_used + job.prefill_left + self.running + 1 > limit:
                return
            waiting.popleft()
            self._admitted += 1
            job.admitted = self._admitted
            self.kv_used += job.prefill_left
            self._reading.append(job)

    def _make_room(self) -> None:
        """Put the youngest back until one more step of all fits into the cache."""
        limit = self.speed.kv_tokens
        while limit is not None and self.kv_used + len(self._decoding) + 1 > limit and self.running > 1:
            of_decoding = max((entry[2] for entry in self._decoding), key=lambda job: job.admitted, default=None)
            if self._reading and (of_decoding is None or self._reading[-1].admitted > of_decoding.admitted):
                job = self._reading.pop()
                self.kv_used -= job.prefill_left + job.read
            elif of_decoding is not None:
                job = of_decoding
                self._decoding.remove((job.due_step, job.admitted, job))
                heapq.heapify(self._decoding)
                job.made = job.output_tokens - (job.due_step - self._steps)
                self.kv_used -= job.input_tokens + job.made
            job.prefill_left, job.read = job.input_tokens + job.made, 0
            self._waiting.appendleft(job)

    def _begin(self, now_ms: float) -> None:
        """Plan the next stretch."""
        if self._waiting:
            self._admit()
        self._make_room()
        decoding = len(self._decoding)
        if not decoding and not self._reading:
            self._stretch, self.next_ms = None, NEVER_MS
            return
        speed = self.speed
        steps = self._decoding[0][0] - self._steps if decoding else 1 << 60
        stretch = _Stretch(now_ms, self.pace, decoding, 1)
        if decoding:
            stretch.linear = speed.tpot_ms + speed.tpot_batch_ms * (decoding - 1)
            if speed.kv_tokens:
                growth = speed.tpot_kv_ms * decoding / speed.kv_tokens / 2
                stretch.linear += speed.tpot_kv_ms * self.kv_used / speed.kv_tokens - growth
                stretch.quadratic = growth
                steps = min(steps, max(1, (speed.kv_tokens - self.kv_used) // decoding))
        if self._reading:
            steps = self._plan_reading(stretch, steps)
        stretch.steps = steps
        self._stretch = stretch
        self.next_ms = stretch.end_ms

    def _plan_reading(self, stretch: _Stretch, steps: int) -> int:
        """Add what is read to a stretch of at most so many steps; give how many it has."""
        speed, first, budget = self.speed, self._reading[0], self.speed.prefill_chunk
        if first.prefill_left >= 2 * budget:
            steps = min(steps, first.prefill_left // budget)
            share, done = budget / 1000, first.read / 1000
            stretch.chunk = budget
            stretch.head = 0.0 if first.read else speed.ttft_ms
            stretch.linear += speed.prefill_ms_per_1k * share + 2 * speed.prefill_quadratic_ms * done * share
            stretch.quadratic += speed.prefill_quadratic_ms * share * share
            return steps
        for job in self._reading:
            tokens = min(budget, job.prefill_left)
            budget -= tokens
            stretch.pieces.append((job, tokens))
            stretch.linear += speed.prefill_ms(job.read + tokens) - speed.prefill_ms(job.read)
            if not job.read:
                stretch.head += speed.ttft_ms
            if not budget:
                break
        return 1

    def _cut(self, now_ms: float) -> None:
        """End the stretch with the step that is under way."""
        stretch = self._stretch
        if stretch is not None and stretch.steps > 1:
            stretch.steps = stretch.steps_until(now_ms)
            self.next_ms = stretch.end_ms
