"""The shipped passages, read as a user would read a file of requests."""

from importlib import resources

from schemas import codecs
from schemas.messages import InferenceRequest

FILE = "passages.jsonl"


def read_passages() -> list[InferenceRequest]:
    """Give the requests of the shipped file, in its order."""
    text = (resources.files("deploy.demo") / FILE).read_bytes()
    return [codecs.decode_ingress(line) for line in text.splitlines()]
