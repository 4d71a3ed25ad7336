"""From a request to the tokens of its prompt, with the model's own tokenizer and template."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_consumers.core.checks import check_tokens
from engine_consumers.errors import EngineError
from schemas.errors import ConfigError, ErrorCode
from schemas.messages import InferenceRequest

BYTES_PER_TOKEN = 4  # of text, for estimates only


class Prompts:
    """Renders and tokenizes in one thread of its own: a long text takes seconds, and tokenizers are not made for several.

    Args:
        tokenizer: Of Hugging Face's kind.
        vocabulary: Number of tokens the model knows.
        chat_template: File or text of a template, instead of the model's own.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, chat_template: str | None = None) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._template = _read_template(chat_template) or getattr(tokenizer, "chat_template", None)
        self._thread = ThreadPoolExecutor(1, "forebay-tokenizer")

    @property
    def has_template(self) -> bool:
        """Whether `messages` can be rendered."""
        return bool(self._template)

    async def tokens(self, request: InferenceRequest) -> list[int]:
        """Give the prompt's tokens: as they are, of the plain text, or of the rendered conversation.

        Raises:
            EngineError: `invalid_request` or `unsupported_feature`.
        """
        if request.input_tokens is not None:
            check_tokens(request.input_tokens, self._vocabulary)
            return request.input_tokens
        if request.messages is not None and not self.has_template:
            message = "`messages`: the model has no chat template: send `prompt`, or set `options.chat_template`"
            raise EngineError(ErrorCode.UNSUPPORTED_FEATURE, message, "messages")
        token_ids = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, request)
        if token_ids and max(token_ids) >= self._vocabulary:
            message = f"the tokenizer gives token {max(token_ids)} where the model knows {self._vocabulary}: they do not fit"
            raise EngineError(ErrorCode.INTERNAL, message)
        return token_ids

    async def text(self, request: InferenceRequest) -> str:
        """Give the text of which the model's tokenizer makes these tokens, for a backend that tokenizes by itself.

        Raises:
            EngineError: `unsupported_feature` where there is none.
        """
        if request.prompt is not None:
            return request.prompt
        token_ids = await self.tokens(request)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._spelled, token_ids)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, request: InferenceRequest) -> list[int]:
        if request.messages is None:
            return list(self._tokenizer.encode(request.prompt))
        turns = [{"role": message.role, "content": message.content} for message in request.messages]
        try:
            text = self._tokenizer.apply_chat_template(
                turns, chat_template=self._template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # noqa: BLE001 - templates are programs of the model's authors and raise what they like
            message = f"`messages`: the model's chat template refuses them: {error}"
            raise EngineError(ErrorCode.INVALID_REQUEST, message, "messages") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _spelled(self, token_ids: list[int]) -> str:
        """Spell tokens, without those that a tokenizer puts around a prompt: the backend's does so again."""
        text = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        for left_out in ("", getattr(self._tokenizer, "bos_token", None) or ""):
            found: str = text.removeprefix(left_out)
            if list(self._tokenizer.encode(found)) == token_ids:
                return found
        message = "the backend takes text alone, and there is no text of which its tokenizer makes this prompt: send `prompt`"
        raise EngineError(ErrorCode.UNSUPPORTED_FEATURE, message)


def estimated_tokens(request: InferenceRequest) -> int:
    """Estimate a prompt's length in tokens, without a tokenizer."""
    if request.input_tokens is not None:
        return len(request.input_tokens)
    texts = [m.content for m in request.messages] if request.messages else [request.prompt or ""]
    return -(-sum(len(text.encode()) for text in texts) // BYTES_PER_TOKEN)


def _read_template(given: str | None) -> str | None:
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"`options.chat_template`: expected a file or the text of a template: {error}"
        raise ConfigError(message) from None
