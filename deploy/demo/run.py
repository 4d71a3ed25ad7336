"""Sends the demo's requests to a running stack and gathers what comes back."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from broker import Client
from schemas import codecs
from schemas.config import Config
from schemas.messages import InferenceRequest, InferenceResult, TokenChunk

ANSWER_S = 600.0  # for all of them, on a slow machine


class Answers(Struct):
    """What came back, in the order of the requests."""

    results: list[InferenceResult]

    @property
    def failed(self) -> list[InferenceResult]:
        """Those that were not answered; a tiny model may end at once, which is an answer of one token."""
        return [r for r in self.results if r.status != "completed" or not (r.output_text.strip() or r.usage.output_tokens)]

    def write(self, out: Path) -> None:
        """Write one result a line."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(b"".join(codecs.encode(result) + b"\n" for result in self.results))


async def ask_all(config: Config, requests: Sequence[InferenceRequest], answered: Callable[[InferenceResult], None]) -> Answers:
    """Send all requests at once, as batch work, and wait for every result.

    Args:
        config: Of the running stack.
        requests: What to ask.
        answered: Told of each result as it comes.

    Raises:
        ClientTimeout: Not all came within ten minutes.
    """

    async def ask(request: InferenceRequest) -> InferenceResult:
        result = await client.submit(request, service_class="batch", timeout_s=ANSWER_S)
        answered(result)
        return result

    async with Client(config) as client:
        results = await asyncio.gather(*(ask(request) for request in requests))
    return Answers(list(results))


async def stream_one(config: Config, request: InferenceRequest, say: Callable[[str], None]) -> InferenceResult | None:
    """Send one request as interactive work and say its text token by token; gives its result."""
    async with Client(config) as client:
        stream = client.stream(structs.asdict(request) | {"id": None}, timeout_s=ANSWER_S)
        async for item in stream:
            if isinstance(item, TokenChunk):
                say(item.text)
        return stream.result
