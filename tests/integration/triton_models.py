"""Small Mixtral and Qwen2-MoE models with random weights, and what transformers says with them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 272
SAID = 40
LENGTHS = (3, 17, 64, 90, 33)  # of prompts: less than a piece, one, and several
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NARROW = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "intermediate_size": 96}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(intermediate_size=96, num_local_experts=8, **COMMON),
    "mixtral-window": transformers.MixtralConfig(
        intermediate_size=96, num_local_experts=4, sliding_window=24, tie_word_embeddings=True, head_dim=32, **COMMON
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(num_experts=8, **NARROW, **COMMON),
    "qwen2-moe-mixed": transformers.Qwen2MoeConfig(
        num_experts=6, norm_topk_prob=True, mlp_only_layers=[1], use_sliding_window=True, sliding_window=24, max_window_layers=2,
        **NARROW, **COMMON
    ),
}  # fmt: skip


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each byte."""
    words = [*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **SPECIAL)


def make(name: str, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Write a model where it is not there; gives prompts, and what transformers goes on with, greedily and without an end."""
    written = folder / "reference.json"
    if not written.exists():
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).float().eval()
        with torch.inference_mode():
            for weight in model.parameters():
                if weight.dim() >= 2:
                    weight.mul_(4.0)  # so that what was read long ago counts as in a trained model
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        written.write_text(json.dumps([_said(model, length) for length in LENGTHS]))
    return [(prompt, said) for prompt, said in json.loads(written.read_text())]


def _said(model: Any, length: int) -> tuple[list[int], list[int]]:
    dice = random.Random(length)
    prompt = [dice.randrange(3, VOCABULARY) for _ in range(length)]
    said = model.generate(torch.tensor([prompt]), max_new_tokens=SAID, do_sample=False, eos_token_id=None)
    return prompt, said[0, length:].tolist()
