"""One stream put together from its chunks: the reader's side of the rule that a later run supersedes an earlier one.

Chunks are advice. They may be lost, come twice, or come from a run that was given up; only the terminal result is
truth, and holds the whole output. So the reader keeps to the newest run, gives nothing twice, and completes from the
result whatever is missing. Where a newer run says something else than what was given already, a `StreamRestarted`
stands before its first chunk.
"""

from dataclasses import dataclass

from msgspec import structs

from schemas.messages import InferenceResult, TokenChunk


@dataclass(frozen=True, slots=True)
class StreamRestarted:
    """What was given of the stream so far is void: the run that follows says something else."""

    request_id: str
    run_id: str


StreamItem = TokenChunk | StreamRestarted


class Assembly:
    """What was given of one stream, and what its newest run has said."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._run_id = ""
        self._next_seq = 0
        self._is_broken = False  # a chunk of this run is missing: what comes after it must wait for the result
        self._given_text: list[str] = []
        self._given_tokens: list[int] = []
        self._repeated: TokenChunk | None = None  # of a newer run: what it said of what was given already
        self._finished = False

    def chunk(self, chunk: TokenChunk) -> list[StreamItem]:
        """Take in a chunk; give what the caller may have of it."""
        if chunk.run_id < self._run_id:
            return []
        if chunk.run_id > self._run_id:
            self._begin(chunk.run_id)
        if self._is_broken or chunk.seq < self._next_seq:
            return []
        if chunk.seq > self._next_seq:
            self._is_broken = True
            return []
        self._next_seq += 1
        if self._repeated is None:
            return [self._give(chunk)]
        seen = self._repeated
        tokens, logprobs = [*seen.token_ids, *chunk.token_ids], [*seen.logprobs, *chunk.logprobs]
        return self._compared(structs.replace(chunk, text=seen.text + chunk.text, token_ids=tokens, logprobs=logprobs))

    def lose(self) -> None:
        """Something of this run was dropped on the way."""
        self._is_broken = True

    def result(self, result: InferenceResult) -> list[StreamItem]:
        """Take in the terminal result; give what is missing of its output."""
        has_output = bool(result.output_text or result.output_tokens)
        if not has_output and result.status != "completed":
            return []
        run_id = result.run_id or self._run_id
        output = result.output_tokens, result.output_text, result.finish_reason, result.logprobs
        whole = TokenChunk(self._request_id, run_id, self._next_seq, *output)
        self._run_id = run_id
        given = "".join(self._given_text)
        if self._finished and given == result.output_text:
            return []
        if result.output_text.startswith(given):
            rest = self._beyond(whole, given)
            return [self._give(rest)] if rest.text or rest.token_ids or rest.finish_reason else []
        return self._restarted(structs.replace(whole, seq=0))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _begin(self, run_id: str) -> None:
        is_first = not self._run_id
        self._run_id, self._next_seq, self._is_broken = run_id, 0, False
        if not is_first and (self._given_text or self._given_tokens):
            self._repeated = TokenChunk(self._request_id, run_id, 0)

    def _compared(self, run: TokenChunk) -> list[StreamItem]:
        """Hold what a newer run has said so far against what was given."""
        given, tokens = "".join(self._given_text), self._given_tokens
        is_same = _agree(run.text, given) and run.token_ids[: len(tokens)] == tokens[: len(run.token_ids)]
        if not is_same:
            return self._restarted(run)
        if len(run.text) < len(given) and run.finish_reason is None:
            self._repeated = run
            return []
        if len(run.text) < len(given) or len(run.token_ids) < len(tokens):  # it ends before what was given does
            return self._restarted(run)
        self._repeated = None
        rest = self._beyond(run, given)
        return [self._give(rest)] if rest.text or rest.token_ids or rest.finish_reason else []

    def _beyond(self, run: TokenChunk, given: str) -> TokenChunk:
        """What a run says beyond what was given."""
        count = len(self._given_tokens)
        return structs.replace(run, text=run.text[len(given) :], token_ids=run.token_ids[count:], logprobs=run.logprobs[count:])

    def _restarted(self, run: TokenChunk) -> list[StreamItem]:
        self._repeated = None
        self._given_text, self._given_tokens, self._finished = [], [], False
        return [StreamRestarted(self._request_id, run.run_id), self._give(run)]

    def _give(self, chunk: TokenChunk) -> TokenChunk:
        self._given_text.append(chunk.text)
        self._given_tokens += chunk.token_ids
        self._finished = chunk.finish_reason is not None
        return chunk


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
