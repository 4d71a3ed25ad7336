"""An engine of a kind that no code of ours knows, by configuration alone: a model of attention and states, run by vLLM."""

import asyncio

import msgspec
import pytest

from broker import Client
from deploy.engines import engine_config, install
from deploy.local import stack
from deploy.local.home import Home
from deploy.local.plan import Wanted
from schemas.config import load_config
from schemas.messages import ChatMessage, InferenceRequest, Sampling

QUESTION = "What is the capital of France? Answer in one sentence."


def configuration(home: Home) -> None:
    """Write what a user would: a kind, what runs it, and a model."""
    install("hybrid", "cpu", lambda _: None)
    engine = engine_config("hybrid", "cpu")
    assert engine is not None
    env = "\n".join(f'{name} = "{value}"' for name, value in engine.env.items())
    home.config.write_text(f"""
[engines.granite]
kind = "hybrid"
backend = "transformer"
model = "tiny-granite"
model_path = "{engine.model_path}"
python = "{engine.python}"
slots = 4

[engines.granite.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512

[engines.granite.env]
{env}
""")


async def ask(home: Home):
    chat = InferenceRequest(
        messages=[ChatMessage("user", QUESTION)],
        max_output_tokens=64,
        routing_hint="hybrid",
        sampling=Sampling(temperature=0.0),
    )
    async with Client(load_config(home.config, {})) as client:
        return await client.submit(msgspec.structs.asdict(chat) | {"id": None}, timeout_s=240)


@pytest.mark.timeout(1800)
def test_a_hybrid_answers_by_configuration_alone(tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    configuration(home)
    stack.up(home.root, Wanted(engines=["granite"]), report=lambda _: None)
    try:
        result = asyncio.run(ask(home))
    finally:
        stack.down(home.root)
    assert (result.status, result.engine, result.finish_reason) == ("completed", "granite", "stop")
    assert result.output_text.endswith(".")
    assert 1 < result.usage.output_tokens < 64
