"""What the transformer engine does with adapters and with arguments of vLLM's own, inside its environment.

Usage: PYTHON tests/integration/transformer_checks.py MODEL_FOLDER SCRATCH_FOLDER; prints one line of JSON for each check.
"""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from conformance.engine_runs import asking, run, same
from in_environment import tell_cases
from msgspec import structs
from safetensors.numpy import save_file

from engine_consumers.engine import Engine
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.errors import ConfigError
from schemas.messages import InferenceRequest

RANK = 4
OPTIONS = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
TEXT = "The river carries water to the turbines and"


def adapter(model: Path, folder: Path, strength: float, width_more: int = 0) -> str:
    """Write a LoRA adapter of random numbers, as peft does.

    Args:
        model: Folder of the model that it is for.
        folder: Where it goes.
        strength: Of what it adds; 0 adds nothing.
        width_more: By so much its matrices are too wide for the model.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dice, tensors = np.random.default_rng(7), {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in (("q_proj", heads), ("v_proj", groups)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            low, high = (RANK, hidden + width_more), (hidden // heads * count, RANK)
            tensors[f"{path}.lora_A.weight"] = dice.standard_normal(low, dtype=np.float32) / hidden**0.5
            tensors[f"{path}.lora_B.weight"] = dice.standard_normal(high, dtype=np.float32) * strength
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "task_type": "CAUSAL_LM"}))
    return str(folder)


def engine_of(model: Path, **options) -> Engine:
    given = {**OPTIONS, **options}
    return load(EngineConfig("transformer", model="base", model_path=str(model), slots=4, options=given))


async def refused(engine: Engine) -> str:
    try:
        await engine.start()
    except ConfigError as error:
        return str(error)
    finally:
        await engine.close()
    message = "it started"
    raise AssertionError(message)


async def check_arguments_that_vllm_does_not_know(model: Path) -> None:
    told = await refused(engine_of(model, engine_args={"max_logprob": 2}))
    assert told.startswith("`options.engine_args.max_logprob`: vLLM "), told
    assert "no such argument: did you mean max_logprobs" in told, told


async def check_an_adapter_that_does_not_fit(model: Path, scratch: Path) -> None:
    bad = adapter(model, scratch / "bad", 1.0, width_more=8)
    told = await refused(engine_of(model, loras={"bad": bad}))
    assert told.startswith(f"`options.loras.bad`: vLLM refuses the adapter in {bad}: "), told
    assert "\n" not in told, told


async def check_adapters_answer_by_their_names_and_leave_the_model_as_it_is(model: Path, scratch: Path) -> None:
    loras = {"odd": adapter(model, scratch / "odd", 4.0), "even": adapter(model, scratch / "even", 0.0)}
    engine = engine_of(model, loras=loras, engine_args={"max_logprobs": 20})
    try:
        await engine.start()
        same(engine.status().models, ("base", "even", "odd"), "models")
        say = partial(_said, engine)
        base = await say("base")
        odd = await say("odd")
        assert odd != base, f"the adapter changes nothing: {odd!r}"
        same(await say("even"), base, "text of an adapter that adds nothing")
        same(await asyncio.gather(say("base"), say("odd"), say("base"), say("odd")), [base, odd, base, odd], "texts at once")
        same(await say("auto"), base, "text for one who takes any model")
    finally:
        await engine.close()


async def _said(engine: Engine, model: str) -> str:
    request: InferenceRequest = structs.replace(asking(TEXT, 16), model=model)
    return (await run(engine, request)).text


def main() -> None:
    model, scratch = map(Path, sys.argv[1:])
    checks = {
        "arguments_that_vllm_does_not_know": partial(check_arguments_that_vllm_does_not_know, model),
        "an_adapter_that_does_not_fit": partial(check_an_adapter_that_does_not_fit, model, scratch),
        "adapters_answer_by_their_names": partial(
            check_adapters_answer_by_their_names_and_leave_the_model_as_it_is, model, scratch
        ),
    }
    asyncio.run(tell_cases(checks))


if __name__ == "__main__":
    main()
