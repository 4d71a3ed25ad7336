"""Errors of the engine consumers.

    EngineError    a request that an engine could not serve, in the words of the taxonomy

A bad option or an unknown kind is `schemas.ConfigError`: it stops the start.
"""

from schemas.errors import ErrorCode

ENGINE_DEAD = 70  # exit code of a worker whose engine died; the supervisor starts it anew


class EngineError(Exception):
    """A request failed in the engine; the code says whether another try may succeed.

    Args:
        code: The taxonomy's word for it.
        message: One sentence, with the numbers where there are any.
        param: Path of the request's field at fault, where one is.
    """

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
