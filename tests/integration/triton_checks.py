"""Runs the cases of the model behind Triton inside its environment.

Usage: PYTHON tests/integration/triton_checks.py FOLDER [CASE ...]; the repository's root is in PYTHONPATH.
Prints one line of JSON for each case.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton_cases
import triton_server
from in_environment import tell_cases

CASES = {
    name.removeprefix("case_"): case
    for module in (triton_cases, triton_server)
    for name, case in vars(module).items()
    if name.startswith("case_")
}


def main() -> None:
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)  # the models are too small for more
    asyncio.run(tell_cases({name: partial(CASES[name], Path(folder)) for name in names or CASES}))


if __name__ == "__main__":
    main()
