"""Runs Triton with the model `forebay_moe`, in the environment that holds both.

python -m deploy.triton --model-path FOLDER --grpc-port PORT [--slots N] [--expert-budget-bytes N] [--cold int8] ...
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import msgspec

from deploy.triton import server
from deploy.triton.options import ModelOptions
from schemas.errors import ConfigError

USAGE = 2


def main() -> int:
    """Read the arguments, and run the server to its end."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m deploy.triton", description="Triton with the model forebay_moe.")
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--metrics-port", type=int, help="none: no metrics")
    names = [field.name for field in msgspec.structs.fields(ModelOptions)]
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", required=name == "model_path")
    given = vars(parser.parse_args())
    try:
        options = msgspec.convert({name: given[name] for name in names if given[name] is not None}, ModelOptions, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    if not (Path(options.model_path).expanduser() / "config.json").is_file():
        parser.error(f"--model-path: expected a folder with a model (config.json), got {options.model_path}")
    try:
        triton = server.triton_folder()
        variables = server.environment(triton)
        with tempfile.TemporaryDirectory(prefix="forebay-triton-") as scratch:
            repository = server.write_repository(Path(scratch), options)
            backends = server.write_backend(Path(scratch), triton)
            argv = server.command(triton, repository, backends, given["host"], given["grpc_port"], given["metrics_port"])
            return server.Server(argv, variables).wait()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return USAGE


if __name__ == "__main__":
    sys.exit(main())
