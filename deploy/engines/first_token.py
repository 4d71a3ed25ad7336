"""Start an engine, ask it for one token, and tell what came of it.

Run by the engine's own interpreter, so that nothing is believed of an environment that was not tried there:
    python -m deploy.engines.first_token CONFIG_AS_JSON
"""

import asyncio
import logging
import sys

import msgspec

from engine_consumers.errors import EngineError
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.errors import ConfigError
from schemas.messages import InferenceRequest, Sampling

MARK = "first token: "  # what libraries print does not begin so
PROMPT = "The river carries"
REQUEST = InferenceRequest(prompt=PROMPT, max_output_tokens=1, sampling=Sampling(temperature=0.0))


async def first_token(config: EngineConfig) -> str:
    """Give the text of the first token after `PROMPT`; it may be half a character, and so empty.

    Raises:
        ConfigError: The engine cannot be imported, or its model cannot be read.
        EngineError: It does not come up, or refuses the request.
    """
    engine = load(config)
    try:
        await engine.start()
        pieces = [piece async for piece in engine.generate(REQUEST, "first-token", seed=1)]
    finally:
        await engine.close()
    if not any(piece.token_ids for piece in pieces):
        message = "the engine ended without a token"
        raise ConfigError(message)
    return "".join(piece.text for piece in pieces)


def main() -> int:
    """Try the engine that is configured in the argument."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    try:
        told = {"text": asyncio.run(first_token(msgspec.json.decode(sys.argv[1], type=EngineConfig)))}
    except (ConfigError, EngineError) as error:
        told = {"error": " ".join(str(error).split())}
    sys.stdout.write(f"\n{MARK}{msgspec.json.encode(told).decode()}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
