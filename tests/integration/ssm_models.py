"""Makes small Mamba models with random weights, and writes down what transformers computes with them.

Usage: PYTHON tests/integration/ssm_models.py FOLDER; the repository's root is in PYTHONPATH. transformers takes
mamba_ssm's kernels where it finds them: this process hides the package, so that the reference owes it nothing.
"""

# ruff: noqa: E402 - the package is hidden before anything looks for it

import sys
from pathlib import Path

sys.modules["mamba_ssm"] = None
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from byte_tokenizer import byte_tokenizer
from safetensors.torch import save_file

VOCABULARY = 316  # no multiple of 8: mamba_ssm pads it
LENGTH, ASKED, SAID = 300, 40, 32
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SECOND = {"state_size": 32, "head_dim": 16, "num_heads": 8, "expand": 2, "chunk_size": 64}
CONFIGS = {
    "mamba": transformers.MambaConfig(state_size=16, **COMMON),
    "mamba2": transformers.Mamba2Config(n_groups=1, **SECOND, **COMMON),
    "mamba2-groups": transformers.Mamba2Config(n_groups=2, tie_word_embeddings=True, **SECOND, **COMMON),
}


def make(name: str, folder: Path) -> None:
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).float().eval()
    with torch.inference_mode():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(2.0)  # so that what was read long ago counts as in a trained model
        ids = torch.randint(3, VOCABULARY, (1, LENGTH))
        logits = model(ids).logits[0]
        said = model.generate(ids[:, :ASKED], max_new_tokens=SAID, do_sample=False)[0, ASKED:]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    save_file(
        {"ids": ids[0], "logits": logits.contiguous(), "said": said.contiguous(), "asked": torch.tensor(ASKED)},
        folder / "reference.safetensors",
    )


if __name__ == "__main__":
    for name in CONFIGS:
        make(name, Path(sys.argv[1]) / name)
