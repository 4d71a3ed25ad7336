"""Runs the engines' cases on one kind of engine, inside that engine's own environment.

Usage: PYTHON tests/conformance/run_engine_cases.py KIND MODEL_FOLDER [CASE ...]; the repository's root is in PYTHONPATH.
Prints one line of JSON for each case.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from conformance.engine_cases import CASES, run_cases
from conformance.engine_harnesses import Harness


def main() -> None:
    kind, model, *names = sys.argv[1:]
    asyncio.run(run_cases(Harness(kind, model), names or list(CASES)))


if __name__ == "__main__":
    main()
