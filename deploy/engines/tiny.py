"""Tiny models for the engines of which no weights can be had without a hub: trained for a minute, where they are installed."""

import hashlib
from pathlib import Path

from deploy.engines.recipes.recipe import OFFLINE, Model, Report
from deploy.local.command import output

LABEL = "tiny, trained for a minute on a few sentences"
SCRIPT, CORPUS = "tiny_training.py", "tiny_corpus.jsonl"
TRAIN_S = 900.0


def is_tiny(label: str) -> bool:
    """Whether weights of that label are of a tiny model."""
    return label == LABEL


def model(name: str) -> Model:
    """Give the tiny model of a name that the script knows; other sentences or another training make another folder."""
    here = Path(__file__).parent
    digest = hashlib.sha256((here / SCRIPT).read_bytes() + (here / CORPUS).read_bytes()).hexdigest()[:8]

    def make(python: Path, out: Path, report: Report) -> None:
        report(f"training {name} for a minute (a tiny model, on a few sentences)")
        environment = {**OFFLINE, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        output([str(python), str(here / SCRIPT), name, str(here / CORPUS), str(out)], TRAIN_S, environment)

    return Model(name, LABEL, f"models/{name}-{digest}", make)
