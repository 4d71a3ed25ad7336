"""Train a tiny model for a minute on a few sentences, so that an engine has a model where no hub is at hand.

Run by the python of an engine's environment (torch, transformers, tokenizers), without a network:
    python tiny_training.py MODEL CORPUS OUTPUT_FOLDER

The models end their answers, write characters of several bytes, and go on with a text for as long as one wants. That is
all they are good for: they have the layers of their families, and know some fifty sentences by heart.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROWS = 4  # of a step
CONTEXT = 512  # tokens of a row, and so what the models are trained for
WORDS = 1_024  # of the vocabulary
CHUNK = 16  # of a scan while training: transformers' own takes memory as its square
CHUNK_AFTER = 64
OF_ATTENTION = (120, 8e-3, 0.1)
WARM_UP_STEPS = 10
SEED = 11
THREADS = 1  # operations are too small for two, which would wait for each other wherever the machine is busy
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, END, SYSTEM, USER, ASSISTANT]
BRIEF = "You answer briefly and only from the passage."
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)
VOCABULARY = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True}
ATTENTION = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


class Family(NamedTuple):
    """A model's layers, and how they are trained.

    Attributes:
        config: Of transformers.
        steps: Attention needs more of them than states do: what was said before is not at hand from the start.
        rate: Of learning, at its highest.
        spread: Of the weights at the start.
    """

    config: Callable[[], Any]
    steps: int = 70
    rate: float = 4e-3
    spread: float | None = None


FAMILIES = {
    "tiny-mamba2": Family(
        lambda: transformers.Mamba2Config(
            hidden_size=128,
            num_hidden_layers=4,
            state_size=32,
            head_dim=32,
            num_heads=8,
            n_groups=1,
            chunk_size=CHUNK,
            max_position_embeddings=CONTEXT,
            **VOCABULARY,
        )
    ),
    "tiny-mamba": Family(
        lambda: transformers.MambaConfig(
            hidden_size=128,
            num_hidden_layers=3,
            state_size=8,
            use_mambapy=True,
            max_position_embeddings=CONTEXT,
            **VOCABULARY,
        )
    ),
    "tiny-mixtral": Family(
        lambda: transformers.MixtralConfig(
            intermediate_size=160, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=2, **ATTENTION, **VOCABULARY
        ),
        *OF_ATTENTION,
    ),
    "tiny-qwen2-moe": Family(
        lambda: transformers.Qwen2MoeConfig(
            intermediate_size=256,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            num_hidden_layers=4,
            num_experts=8,
            num_experts_per_tok=2,
            **ATTENTION,
            **VOCABULARY,
        ),
        *OF_ATTENTION,
    ),
    "tiny-granite-hybrid": Family(
        lambda: transformers.GraniteMoeHybridConfig(
            intermediate_size=128,
            shared_intermediate_size=256,
            num_hidden_layers=4,
            layer_types=["mamba", "attention", "mamba", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=CHUNK,
            mamba_expand=2,
            **ATTENTION,
            **VOCABULARY,
        )
    ),
}


class Corpus:
    """The sentences, as rows of tokens without end.

    Half of the rows are conversations, each answer of which ends; the others are text that goes on, which is what a bare
    prompt is answered with.

    Args:
        lines: `question` and `answer`; or `text` and what it is `about`; or what is written `again` and again.
    """

    def __init__(self, lines: list[dict[str, str]]) -> None:
        self._dice = random.Random(SEED)  # noqa: S311 - for chance, not for secrets
        self._asked = [(line["question"], line["answer"]) for line in lines if "question" in line]
        self._texts = [(line["text"], line["about"]) for line in lines if "text" in line]
        self._again = [line["again"] for line in lines if "again" in line]
        self.tokenizer = self._make_tokenizer()

    def rows(self, number: int) -> torch.Tensor:
        """Give rows of `CONTEXT` tokens."""
        return torch.tensor([self._row(self._talk if n % 2 else self._prose) for n in range(number)])

    def _row(self, more: Callable[[], str]) -> list[int]:
        row: list[int] = []
        while len(row) < CONTEXT:
            row += self.tokenizer.encode(more())
        return row[:CONTEXT]

    def _talk(self) -> str:
        if self._dice.random() < 0.2:
            text, answer = self._dice.choice(self._texts)
            start = self._dice.randrange(len(text) // 2)
            question = f"Passage:\n{text[start:]}\n\n{self._dice.choice(['What is this about?', 'Summarise this passage.'])}"
        else:
            question, answer = self._dice.choice(self._asked)
        system = f"{SYSTEM}{BRIEF}" if self._dice.random() < 0.2 else ""
        return f"{system}{USER}{question}{ASSISTANT}{answer}{END}"

    def _prose(self) -> str:
        if self._dice.random() < 0.15:
            return (self._dice.choice(self._again) + " ") * self._dice.randint(3, 8)
        text, _ = self._dice.choice(self._texts)
        words = text.split(" ")
        start = self._dice.choice([0, self._dice.randrange(len(words) // 2)])
        heading = f"Story {self._dice.randrange(10)}: " if self._dice.random() < 0.3 else ""
        return heading + " ".join(words[start:]) + " "

    def _make_tokenizer(self) -> PreTrainedTokenizerFast:
        """Learn words from plain ASCII only: every other character takes as many tokens as it has bytes."""
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
        parts = [part for pair in (*self._asked, *self._texts) for part in pair]
        made.train_from_iterator([part for part in parts if part.isascii()], trainer)
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            eos_token=END,
            pad_token=PAD,
            additional_special_tokens=[SYSTEM, USER, ASSISTANT],
            model_max_length=CONTEXT,
            clean_up_tokenization_spaces=False,
            chat_template=TEMPLATE,
        )


def train(name: str, corpus: Corpus) -> Any:  # noqa: ANN401 - transformers has no types
    """Give a model of a family, trained."""
    torch.manual_seed(SEED)
    family = FAMILIES[name]
    config = family.config()
    config.dtype = torch.float32
    if family.spread is not None:
        config.initializer_range = family.spread
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=family.rate, betas=(0.9, 0.98), weight_decay=0.01)

    def share(step: int) -> float:
        return min((step + 1) / WARM_UP_STEPS, (family.steps - step) / (family.steps - WARM_UP_STEPS))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(family.steps):
        rows = corpus.rows(ROWS)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == family.steps - 1:
            sys.stderr.write(f"{name}: step {step}, loss {loss.item():.2f}\n")
    return model.eval()


def main(name: str, corpus: Path, out: Path) -> None:
    """Train a model and write it with its tokenizer."""
    torch.set_num_threads(THREADS)
    torch.set_flush_denormal(True)  # states that fade away become numbers on which a CPU is many times slower
    made = Corpus([json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()])
    model = train(name, made)
    for field in ("chunk_size", "mamba_chunk_size"):
        if hasattr(model.config, field):
            setattr(model.config, field, CHUNK_AFTER)
    model.save_pretrained(out)
    made.tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in FAMILIES:
        sys.exit(f"{__doc__}\nMODEL is one of: {', '.join(FAMILIES)}")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
