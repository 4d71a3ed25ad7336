"""An engine that is kept busy and shares its device: run with its own interpreter by whoever watches the shares.

Usage: PYTHON sliced_engine.py CONFIG COUNT_FILE; CONFIG is an `EngineConfig` in JSON, and the repository's root is in
PYTHONPATH. It writes the number of tokens made so far into the file, as eight bytes, and says `up` once the first have come.
It ends with its standard input, and with `ENGINE_DEAD` where its engine died.
"""

import asyncio
import mmap
import os
import sys
from pathlib import Path

import msgspec

from engine_consumers.engine import Engine
from engine_consumers.errors import ENGINE_DEAD
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest, Sampling

TOKENS = 400


async def busy(engine: Engine, slot: int, count: mmap.mmap) -> None:
    """One request after another."""
    request = InferenceRequest(prompt="Water runs down the hill and", max_output_tokens=TOKENS, sampling=Sampling(seed=slot))
    run = 0
    while True:
        run += 1
        async for piece in engine.generate(request, f"{slot}.{run}", seed=run):
            made = int.from_bytes(count[:8], "little")
            count[:8] = (made + len(piece.token_ids)).to_bytes(8, "little")
            if not made and piece.token_ids:
                sys.stdout.write("up\n")
                sys.stdout.flush()


async def main(config: EngineConfig, count: mmap.mmap) -> int:
    """Run until the end of the input, or of the engine."""
    engine = load(config)
    try:
        await engine.start()
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        died = asyncio.create_task(engine.died())
        slots = [asyncio.create_task(busy(engine, slot, count)) for slot in range(config.slots)]
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
    code = asyncio.run(main(msgspec.json.decode(sys.argv[1], type=EngineConfig), shared))
    os._exit(code)  # the thread that reads the input would keep the process, where it was the engine that ended
