"""The requests of a chaos run: a plain producer that knows what was acknowledged."""

import asyncio
import json
import random
import time
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from raw import request

REQUEST_MS = 60_000  # longer than the broker is ever away: then the library tries again by itself
CLOSE_S = 5.0
AGAIN_S = 0.5
LONG_EVERY, LONG_TOKENS, TOKENS = 40, 300, (8, 64)
TENANTS = 7


class Load:
    """Produces requests at a steady rate, until so many were acknowledged.

    A request whose acknowledgement did not come is not sent again: it may lie in Kafka or not, so it counts neither
    as accepted nor, where it is answered, as a stranger.
    """

    def __init__(self, bootstrap: str, topics: dict[str, str], wanted: int, span_s: float, seed: int) -> None:
        self._bootstrap, self._topics, self._wanted, self._gap_s = bootstrap, topics, wanted, span_s / wanted
        self._dice = random.Random(f"load {seed}")
        self._producer: AIOKafkaProducer | None = None
        self._failed = False
        self._open: set[asyncio.Future[Any]] = set()
        self._made = 0
        self.accepted: dict[str, float] = {}  # id -> when it was acknowledged
        self.uncertain: set[str] = set()

    async def run(self) -> None:
        """Produce until all are acknowledged."""
        began = time.monotonic()
        try:
            while len(self.accepted) < self._wanted:
                if len(self.accepted) + len(self._open) >= self._wanted:
                    await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
                    continue
                await asyncio.sleep(max(0.0, began + self._made * self._gap_s - time.monotonic()))
                await self._send()
        finally:
            await self._let_go()

    async def _send(self) -> None:
        self._made += 1
        ident, dice = f"r{self._made:06d}", self._dice
        tokens = LONG_TOKENS if self._made % LONG_EVERY == 0 else dice.randint(*TOKENS)
        more = {"stream": True} if dice.random() < 0.1 else {}
        value = request(ident, tenant=f"t{dice.randrange(TENANTS)}", max_output_tokens=tokens, **more)
        topic = self._topics["interactive" if dice.random() < 0.2 else "batch"]
        try:
            producer = await self._ready()
            sent = await producer.send(topic, json.dumps(value).encode(), key=ident.encode())
        except (KafkaError, OSError, TimeoutError):
            self._failed = True
            self.uncertain.add(ident)
            return
        self._open.add(sent)
        sent.add_done_callback(lambda done: self._settle(ident, done))

    def _settle(self, ident: str, done: "asyncio.Future[Any]") -> None:
        self._open.discard(done)
        if done.cancelled() or done.exception() is not None:
            self._failed = True  # the library's idempotent producer does not recover from what it gives up
            self.uncertain.add(ident)
        else:
            self.accepted[ident] = time.monotonic()

    async def _ready(self) -> AIOKafkaProducer:
        if self._failed:
            await self._let_go()
            self._failed = False
        while self._producer is None:
            made = AIOKafkaProducer(
                bootstrap_servers=self._bootstrap, acks="all", enable_idempotence=True, request_timeout_ms=REQUEST_MS
            )
            try:
                await made.start()
                self._producer = made
            except (KafkaError, OSError):
                await made.stop()
                await asyncio.sleep(AGAIN_S)
        return self._producer

    async def _let_go(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                await asyncio.wait_for(producer.stop(), CLOSE_S)
            except (KafkaError, OSError, TimeoutError):
                self._failed = True
