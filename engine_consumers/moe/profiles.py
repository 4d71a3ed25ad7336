"""Profiles: which tensors a model behind Triton takes and gives, and what they mean.

The one of our own model gives everything an engine has to. Of the others' models only what they document is used. Their
answers' text is cut at stop strings here, and those that give text alone have their tokens made of it by the tokenizer: how
many there are may differ from what the model drew, which is why the usage is what the model counted, where it counts.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from engine_consumers.core.stream import StopText
from engine_consumers.errors import EngineError
from engine_consumers.moe.tensors import ANY, Tensor, Values
from schemas.errors import ErrorCode
from schemas.features import CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP
from schemas.messages import FinishReason, Sampling

Names = frozenset[str]
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Asked(NamedTuple):
    """One run, as it is sent.

    Attributes:
        run: Its name, unique among all runs of all who use the server.
        text: The prompt as text that the model's own tokenizer turns into `token_ids`; for profiles that take text.
        room: Tokens it may give.
    """

    run: str
    token_ids: list[int]
    text: str
    room: int
    seed: int
    priority: int
    sampling: Sampling


class Said(NamedTuple):
    """What one response gave.

    Attributes:
        finish: With the last one.
        counted: Tokens of prompt and output so far, where the model counts them.
        statistics: The model's own figures, where it tells them.
    """

    token_ids: list[int]
    text: str
    finish: FinishReason | None = None
    counted: tuple[int, int] | None = None
    statistics: dict[str, Any] | None = None


class Words(Protocol):
    """The tokenizer."""

    ends: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that are put around a prompt."""

    def speller(self, stops: list[str], room: int) -> Callable[[int], tuple[str, FinishReason | None]]:
        """Make what turns one token after another into text, and says where the answer ends."""


class Reader(Protocol):
    """Reads the responses of one run."""

    def read(self, values: Values, *, is_final: bool) -> Said:
        """Read the next one.

        Raises:
            EngineError: The model says that it failed, or what it gives makes no sense.
        """


class Profile(Protocol):
    """One kind of model.

    Attributes:
        model: Its usual name.
        takes_text: Whether the prompt is sent as text.
        inputs: What is sent.
        outputs: What is read.
    """

    model: str
    takes_text: bool
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def features(self, given: Names) -> tuple[str, ...]:
        """What a model with these inputs can do."""

    def ask(self, asked: Asked, given: Names, words: Words) -> Values:
        """Give what is sent to a model with these inputs.

        Raises:
            EngineError: `unsupported_feature` for what it has no input for.
        """

    def reader(self, asked: Asked, words: Words) -> Reader:
        """Make what reads the answer."""

    def operation(self, op: str, **fields: object) -> Values | None:
        """Give a request beside the runs, `cancel` or `status`; None where the model knows none."""


class Forebay:
    """Our own model; `deploy/triton` has it."""

    model = "forebay_moe"
    takes_text = False
    inputs: Mapping[str, Tensor] = {"input_ids": Tensor("INT32", (ANY,)), "request": Tensor("BYTES")}
    outputs: Mapping[str, Tensor] = {
        "output_ids": Tensor("INT32", (ANY,)),
        **{name: Tensor("BYTES") for name in ("text", "finish_reason", "error", "statistics")},
    }

    def features(self, given: Names) -> tuple[str, ...]:  # noqa: ARG002 - it has them all
        """See `Profile.features`."""
        return (CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP)

    def ask(self, asked: Asked, given: Names, words: Words) -> Values:  # noqa: ARG002
        """See `Profile.ask`."""
        request = {
            "op": "generate",
            "run": asked.run,
            "max_output_tokens": asked.room,
            "seed": asked.seed,
            "priority": asked.priority,
            "sampling": asked.sampling,
        }
        return {"input_ids": list(asked.token_ids), "request": [msgspec.json.encode(request)]}

    def reader(self, asked: Asked, words: Words) -> Reader:  # noqa: ARG002
        """See `Profile.reader`."""
        return _ForebayReader()

    def operation(self, op: str, **fields: object) -> Values:
        """See `Profile.operation`."""
        return {"input_ids": [0], "request": [json.dumps({"op": op, **fields}).encode()]}


class _ForebayReader:
    def read(self, values: Values, *, is_final: bool) -> Said:
        said = {name: _text(values, name) for name in ("text", "finish_reason", "error", "statistics")}
        if said["error"]:
            raise _failure(said["error"])
        finish = FINISH.get(said["finish_reason"])
        if is_final and finish is None:
            message = f"the model ended the run with {said['finish_reason']!r}: expected stop, length or abort"
            raise EngineError(ErrorCode.INTERNAL, message)
        statistics = json.loads(said["statistics"]) if said["statistics"] else None
        return Said(values.get("output_ids", []), said["text"], finish, statistics=statistics)


class Vllm:
    """Triton's vLLM backend."""

    model = "vllm_model"
    takes_text = True
    inputs: Mapping[str, Tensor] = {
        "text_input": Tensor("BYTES"),
        "stream": Tensor("BOOL"),
        "sampling_parameters": Tensor("BYTES"),
        **{
            name: Tensor("BOOL", is_optional=True)
            for name in (
                "exclude_input_in_output",
                "return_finish_reason",
                "return_num_input_tokens",
                "return_num_output_tokens",
            )
        },
    }
    outputs: Mapping[str, Tensor] = {
        "text_output": Tensor("BYTES", (ANY,)),
        "finish_reason": Tensor("BYTES", (ANY,), is_optional=True),
        "num_input_tokens": Tensor("UINT32", is_optional=True),
        "num_output_tokens": Tensor("UINT32", (ANY,), is_optional=True),
    }

    def features(self, given: Names) -> tuple[str, ...]:  # noqa: ARG002 - it has these in any version
        """See `Profile.features`."""
        return (CHAT, PENALTIES, SEED, STOP)

    def ask(self, asked: Asked, given: Names, words: Words) -> Values:  # noqa: ARG002
        """See `Profile.ask`."""
        sampling = asked.sampling
        parameters = {
            "max_tokens": asked.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop": list(sampling.stop),
            "seed": asked.seed,
        }
        flags = {name: [True] for name, tensor in self.inputs.items() if tensor.datatype == "BOOL" and name in given}
        return {"text_input": [asked.text.encode()], "sampling_parameters": [json.dumps(parameters).encode()], **flags}

    def reader(self, asked: Asked, words: Words) -> Reader:
        """See `Profile.reader`."""
        return _TextReader(asked, words)

    def operation(self, op: str, **fields: object) -> None:
        """See `Profile.operation`."""


class _TensorRt:
    """What the models of TensorRT-LLM's backend have in common.

    Attributes:
        top_k: Its name.
        top_p: Its name.
    """

    top_k, top_p = "top_k", "top_p"

    def features(self, given: Names) -> tuple[str, ...]:
        """See `Profile.features`."""
        also = ((PENALTIES, {"presence_penalty", "frequency_penalty"}), (SEED, {"random_seed"}))
        return tuple(sorted({CHAT, STOP, *(feature for feature, names in also if names <= given)}))

    def operation(self, op: str, **fields: object) -> None:
        """See `Profile.operation`."""

    def _drawing(self, asked: Asked, given: Names) -> Values:
        """What says how tokens are drawn; all of it is said, as their own defaults are greedy."""
        sampling = asked.sampling
        is_greedy = sampling.temperature == 0
        wanted: dict[str, tuple[Any, bool]] = {
            "temperature": (1.0 if is_greedy else sampling.temperature, sampling.temperature not in {0.0, 1.0}),
            self.top_k: (1 if is_greedy else sampling.top_k, True),
            self.top_p: (1.0 if is_greedy else sampling.top_p, sampling.top_p != 1.0),
            "presence_penalty": (sampling.presence_penalty, bool(sampling.presence_penalty)),
            "frequency_penalty": (sampling.frequency_penalty, bool(sampling.frequency_penalty)),
            "min_p": (sampling.min_p, bool(sampling.min_p)),
            "random_seed": (asked.seed, False),
        }
        for name, (value, is_needed) in wanted.items():
            if is_needed and name not in given:
                field = name.removeprefix("runtime_")
                message = f"`sampling.{field}`: the model has no input `{name}`, so it cannot take {value}"
                raise EngineError(ErrorCode.UNSUPPORTED_FEATURE, message, f"sampling.{field}")
        return {name: [value] for name, (value, _) in wanted.items() if name in given}


_DRAWING = {
    "temperature": Tensor("FP32", is_optional=True),
    "presence_penalty": Tensor("FP32", is_optional=True),
    "frequency_penalty": Tensor("FP32", is_optional=True),
    "min_p": Tensor("FP32", is_optional=True),
    "random_seed": Tensor("UINT64", is_optional=True),
}


class TensorRt(_TensorRt):
    """TensorRT-LLM's core model, of tokens."""

    model = "tensorrt_llm"
    takes_text = False
    top_k, top_p = "runtime_top_k", "runtime_top_p"
    inputs: Mapping[str, Tensor] = {
        "input_ids": Tensor("INT32", (ANY,)),
        "input_lengths": Tensor("INT32"),
        "request_output_len": Tensor("INT32"),
        "streaming": Tensor("BOOL"),
        "end_id": Tensor("INT32", is_optional=True),
        "runtime_top_k": Tensor("INT32", is_optional=True),
        "runtime_top_p": Tensor("FP32", is_optional=True),
        **_DRAWING,
    }
    outputs: Mapping[str, Tensor] = {
        "output_ids": Tensor("INT32", (ANY, ANY)),
        "sequence_length": Tensor("INT32", (ANY,)),
    }

    def features(self, given: Names) -> tuple[str, ...]:
        """See `Profile.features`."""
        return tuple(sorted({*super().features(given), INPUT_TOKENS}))

    def ask(self, asked: Asked, given: Names, words: Words) -> Values:
        """See `Profile.ask`."""
        end = {"end_id": [min(words.ends)]} if words.ends and "end_id" in given else {}
        return {
            "input_ids": list(asked.token_ids),
            "input_lengths": [len(asked.token_ids)],
            "request_output_len": [asked.room],
            "streaming": [True],
            **end,
            **self._drawing(asked, given),
        }

    def reader(self, asked: Asked, words: Words) -> Reader:
        """See `Profile.reader`."""
        return _TokenReader(asked, words)


class TensorRtBls(_TensorRt):
    """The model that TensorRT-LLM's backend puts around its core, of text. It must not accumulate tokens."""

    model = "tensorrt_llm_bls"
    takes_text = True
    inputs: Mapping[str, Tensor] = {
        "text_input": Tensor("BYTES"),
        "max_tokens": Tensor("INT32"),
        "stream": Tensor("BOOL"),
        "stop_words": Tensor("BYTES", (ANY,), is_optional=True),
        "end_id": Tensor("INT32", is_optional=True),
        "top_k": Tensor("INT32", is_optional=True),
        "top_p": Tensor("FP32", is_optional=True),
        **_DRAWING,
    }
    outputs: Mapping[str, Tensor] = {"text_output": Tensor("BYTES", (ANY,))}

    def ask(self, asked: Asked, given: Names, words: Words) -> Values:
        """See `Profile.ask`."""
        end = {"end_id": [min(words.ends)]} if words.ends and "end_id" in given else {}
        stops = [stop.encode() for stop in asked.sampling.stop]
        return {
            "text_input": [asked.text.encode()],
            "max_tokens": [asked.room],
            "stream": [True],
            **({"stop_words": stops} if stops and "stop_words" in given else {}),
            **end,
            **self._drawing(asked, given),
        }

    def reader(self, asked: Asked, words: Words) -> Reader:
        """See `Profile.reader`."""
        return _TextReader(asked, words)


class _TokenReader:
    """Reads a model that gives tokens and neither text nor a reason."""

    def __init__(self, asked: Asked, words: Words) -> None:
        self._spell = words.speller(asked.sampling.stop, asked.room)

    def read(self, values: Values, *, is_final: bool) -> Said:
        count = (values.get("sequence_length") or [0])[0]
        token_ids, text = [], ""
        for token in values.get("output_ids", [])[:count]:
            more, finish = self._spell(token)
            token_ids.append(token)
            text += more
            if finish is not None:
                return Said(token_ids, text, finish)
        return Said(token_ids, text, "stop" if is_final else None)


class _TextReader:
    """Reads a model that gives text as it comes, and perhaps a reason and counts."""

    def __init__(self, asked: Asked, words: Words) -> None:
        self._stop, self._words, self._room = StopText(asked.sampling.stop), words, asked.room
        self._given = self._counted = 0
        self._prompt = len(asked.token_ids)

    def read(self, values: Values, *, is_final: bool) -> Said:
        raw = b"".join(values.get("text_output", [])).decode("utf-8", "replace")
        text = self._stop.push(raw)
        told = _text(values, "finish_reason")
        is_last = is_final or self._stop.hit is not None or told in FINISH
        if is_last and self._stop.hit is None:
            text += self._stop.finish()
        token_ids = self._words.encode(raw) if raw else []
        self._given += len(token_ids)
        self._counted += sum(values.get("num_output_tokens", []))
        self._prompt = (values.get("num_input_tokens") or [self._prompt])[0]
        if not is_last:
            return Said(token_ids, text)
        said = self._counted or self._given
        finish = FINISH.get(told, "length" if said >= self._room else "stop")
        return Said(token_ids, text, "stop" if self._stop.hit else finish, (self._prompt, said))


PROFILES: dict[str, Profile] = {
    "forebay": Forebay(),
    "vllm": Vllm(),
    "tensorrt_llm": TensorRt(),
    "tensorrt_llm_bls": TensorRtBls(),
}


def _text(values: Values, name: str) -> str:
    found = values.get(name) or [b""]
    raw = found[0]
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _failure(raw: str) -> EngineError:
    """What our model says of a failure."""
    try:
        told = json.loads(raw)
        return EngineError(ErrorCode(told["code"]), str(told["message"]))
    except (ValueError, KeyError, TypeError):
        return EngineError(ErrorCode.INTERNAL, f"the model failed: {raw[:300]}")
