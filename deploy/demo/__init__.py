"""The demo: from nothing to answers on this machine."""

from deploy.demo.passages import read_passages
from deploy.demo.run import Answers, ask_all, stream_one

__all__ = ["Answers", "ask_all", "read_passages", "stream_one"]
