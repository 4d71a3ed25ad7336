"""The command line: `forebay`."""

from deploy.cli.app import main

__all__ = ["main"]
