"""An engine that is kept busy and shares its device: run with its own interpreter by whoever watches the shares.

Usage: PYTHON sliced_engine.py CONFIG COUNT_FILE; CONFIG is an `EngineConfig` in JSON, and the repository's root is in
PYTHONPATH. It writes the number of tokens made so far into the file, as eight bytes, and says `up` once the first have come.
Lines of its input are `pause` and `go`; it ends with the input, and with `ENGINE_DEAD` where its engine died.
"""

import asyncio
import contextlib
import itertools
import mmap
import sys
from functools import partial
from pathlib import Path

import msgspec

from engine_consumers.engine import Engine
from engine_consumers.errors import ENGINE_DEAD
from engine_consumers.registry import load
from engine_consumers.threads import in_thread
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest, Sampling

TOKENS = 400


async def busy(engine: Engine, slot: int, count: mmap.mmap, going: asyncio.Event) -> None:
    """One request after another, except in a pause."""
    request = InferenceRequest(prompt="Water runs down the hill and", max_output_tokens=TOKENS, sampling=Sampling(seed=slot))
    for run in itertools.count(1):
        await going.wait()
        async with contextlib.aclosing(engine.generate(request, f"{slot}.{run}", seed=run)) as pieces:
            async for piece in pieces:
                made = int.from_bytes(count[:8], "little")
                count[:8] = (made + len(piece.token_ids)).to_bytes(8, "little")
                if not made and piece.token_ids:
                    sys.stdout.write("up\n")
                    sys.stdout.flush()
                if not going.is_set():
                    break


def obey(going: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Read the input to its end."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(going.set if line == "go\n" else going.clear)


async def main(config: EngineConfig, count: mmap.mmap) -> int:
    """Run until the end of the input, or of the engine."""
    engine, going = load(config), asyncio.Event()
    going.set()
    try:
        await engine.start()
        ended = asyncio.create_task(in_thread(partial(obey, going, asyncio.get_running_loop())))
        died = asyncio.create_task(engine.died())
        slots = [asyncio.create_task(busy(engine, slot, count, going)) for slot in range(config.slots)]
        await asyncio.wait([ended, died], return_when=asyncio.FIRST_COMPLETED)
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        return ENGINE_DEAD if died.done() else 0
    finally:
        await engine.close()


if __name__ == "__main__":
    with Path(sys.argv[2]).open("w+b") as file:
        file.truncate(8)
        shared = mmap.mmap(file.fileno(), 8)
    sys.exit(asyncio.run(main(msgspec.json.decode(sys.argv[1], type=EngineConfig), shared)))
