"""Asking running processes: a question goes to all of them, and whoever has something to say answers whom asked.

It is advice: a question or an answer that is lost, or comes late, costs nothing. Over Redis it is a message on one channel
of the cell, which names the channel that the answers come on; who is asked is who listens at that moment.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
from msgspec import structs
from redis.exceptions import RedisError

from memory_coordinator.connecting import connect, unreachable
from schemas.config import RedisConfig
from schemas.errors import InvalidMessage
from schemas.ids import new_id
from schemas.questions import Answer, Asked, Question, decode_answer, decode_asked

log = logging.getLogger("forebay.asking")

Reply = Callable[[Question], Answer]

QUESTION_BYTES_MAX = 4_096
ANSWERS_MAX = 10_000
PAUSE_S = 0.5


class Asking(Protocol):
    """The way to running processes, and from them."""

    async def ask(self, question: Question, timeout_s: float) -> list[Answer]:
        """Ask all that listen, and give their answers by name; those that take longer are not waited for.

        Raises:
            ConnectionError: Nobody can be asked: in one line, with what to do.
        """

    async def answer(self, reply: Reply) -> None:
        """Answer questions until cancelled; nothing that comes in, and no outage, ends it."""

    async def close(self) -> None:
        """Let go."""


class MemoryAsking:
    """The way inside one process, for simulation and for tests.

    Args:
        config: Bounds.
    """

    def __init__(self, config: RedisConfig | None = None) -> None:
        self._config = config or RedisConfig()
        self._listening: dict[asyncio.Queue[tuple[bytes, asyncio.Queue[bytes]]], None] = {}

    async def ask(self, question: Question, timeout_s: float) -> list[Answer]:
        """Ask all that listen."""
        asked = msgspec.msgpack.encode(Asked(new_id(), question))
        await asyncio.sleep(0)  # it takes its time, as over a wire
        answers: asyncio.Queue[bytes] = asyncio.Queue(ANSWERS_MAX)
        for queue in self._listening:
            queue.put_nowait((asked, answers))
        gathered = Gathered(len(self._listening))
        try:
            async with asyncio.timeout(timeout_s):
                while not gathered.is_complete:
                    gathered.add(await answers.get())
        except TimeoutError:
            pass
        return gathered.answers

    async def answer(self, reply: Reply) -> None:
        """Answer questions until cancelled."""
        queue: asyncio.Queue[tuple[bytes, asyncio.Queue[bytes]]] = asyncio.Queue()
        answering = Answering(self._config, reply)
        self._listening[queue] = None
        try:
            while True:
                asked, answers = await queue.get()
                said = answering.take(asked)
                if said is not None:
                    answers.put_nowait(said[1])
        finally:
            del self._listening[queue]

    async def close(self) -> None:
        """Nothing to let go of."""


class RedisAsking:
    """The way over Redis.

    Args:
        config: Where it is, and bounds.
        prefix: The cell's topic prefix, also the first part of each channel.

    Raises:
        ConfigError: The URL is none that Redis's client knows.
    """

    def __init__(self, config: RedisConfig, prefix: str) -> None:
        self._config, self._redis = config, connect(config)
        self._questions, self._answers = f"{prefix}:questions", f"{prefix}:answers:"

    async def ask(self, question: Question, timeout_s: float) -> list[Answer]:
        """Ask all that listen.

        Raises:
            ConnectionError: Redis is not there.
        """
        asked, loop = Asked(new_id(), question), asyncio.get_running_loop()
        try:
            async with self._redis.pubsub() as pubsub:
                await pubsub.subscribe(f"{self._answers}{asked.id}")
                until = loop.time() + timeout_s
                gathered: Gathered | None = None
                while (left_s := until - loop.time()) > 0 and not (gathered and gathered.is_complete):
                    message = await pubsub.get_message(timeout=left_s)
                    if message is None:
                        continue
                    if message["type"] == "subscribe":  # answers can be heard now
                        count = await self._redis.publish(self._questions, msgspec.msgpack.encode(asked))
                        gathered = Gathered(count)
                    elif gathered is not None:
                        gathered.add(message["data"])
        except (RedisError, OSError) as error:
            raise unreachable(self._config, error) from None
        return gathered.answers if gathered else []

    async def answer(self, reply: Reply) -> None:
        """Answer questions until cancelled; while Redis is away nobody asks."""
        answering = Answering(self._config, reply)
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._questions)
                    while True:
                        message = await pubsub.get_message(timeout=self._config.timeout_ms / 1000)
                        said = None if message is None else answering.take(message["data"])
                        if said is not None:
                            await self._redis.publish(f"{self._answers}{said[0]}", said[1])
            except (RedisError, OSError) as error:
                log.warning("questions_unreadable error=%r", error)
                await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._redis.aclose()


class Gathered:
    """The answers to one question.

    Args:
        expected: How many were asked.
    """

    def __init__(self, expected: int) -> None:
        self._expected, self._answers = min(expected, ANSWERS_MAX), list[Answer]()
        self._came = 0

    @property
    def is_complete(self) -> bool:
        """Whether all that were asked have answered."""
        return self._came >= self._expected

    @property
    def answers(self) -> list[Answer]:
        """By name."""
        return sorted(self._answers, key=lambda answer: (answer.name, answer.role))

    def add(self, value: bytes) -> None:
        """Take in an answer; one that cannot be read is passed over."""
        self._came += 1
        try:
            self._answers.append(decode_answer(value))
        except InvalidMessage as error:
            log.warning("answer_unreadable error=%s", error)


class Answering:
    """One process's answers, within bounds of rate and size.

    Args:
        config: The bounds.
        reply: Says what is to be answered.
    """

    def __init__(self, config: RedisConfig, reply: Reply) -> None:
        self._rate, self._bytes_max, self._reply = config.questions_per_s_max, config.answer_bytes_max, reply
        self._times: deque[float] = deque(maxlen=self._rate)
        self._passed_over = 0

    def take(self, value: bytes) -> tuple[str, bytes] | None:
        """Give the question's id and the answer, or None where there is none: a bad question, or one too many."""
        now_s = asyncio.get_running_loop().time()
        if len(self._times) == self._rate and now_s - self._times[0] < 1:
            self._passed_over += 1
            if self._passed_over == 1:
                log.warning("questions_passed_over reason=more_than_%d_a_second (redis.questions_per_s_max)", self._rate)
            return None
        self._times.append(now_s)
        self._passed_over = 0
        try:
            if len(value) > QUESTION_BYTES_MAX:
                message = f"it has {len(value)} bytes: at most {QUESTION_BYTES_MAX} are taken"
                raise InvalidMessage(message)  # noqa: TRY301 - one place passes all over
            asked = decode_asked(value)
        except InvalidMessage as error:
            log.warning("question_passed_over reason=%s", error)
            return None
        try:
            answer = self._reply(asked.question)
        except Exception:  # a fault of ours must not end the process for a question
            log.exception("question_unanswered kind=%s", type(asked.question).__name__)
            return None
        said = msgspec.msgpack.encode(answer)
        if len(said) > self._bytes_max:
            log.warning("answer_too_large bytes=%d (redis.answer_bytes_max)", len(said))
            said = msgspec.msgpack.encode(structs.replace(answer, found=[], state=None, is_cut=True))
        return asked.id, said
