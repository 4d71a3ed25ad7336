"""A simulated request: what was asked, and when what became of it. Times are milliseconds since the run began."""

from typing import Final

from schemas.messages import Fallback, ServiceClass

NEVER_MS: Final = float("inf")


class Ask:
    """What requests of one kind have in common.

    Attributes:
        number: Its place among the kinds of the scenario.
        engine: The engine it is meant for, which alone serves it where engines are kept apart.
    """

    __slots__ = ("deadline_ms", "engine", "fallback", "hint", "model", "number", "service_class", "slo_ms", "tenant")

    def __init__(
        self,
        number: int,
        engine: str,
        tenant: str,
        service_class: ServiceClass,
        model: str,
        hint: str,
        fallback: Fallback,
        slo_ms: int | None,
        deadline_ms: int | None,
    ) -> None:
        self.number, self.engine, self.tenant, self.service_class = number, engine, tenant, service_class
        self.model, self.hint, self.fallback = model, hint, fallback
        self.slo_ms, self.deadline_ms = slo_ms, deadline_ms


class Job:
    """One request.

    Attributes:
        sent_ms: When it was given to a worker.
        begun_ms: When its last run got a slot there.
        first_ms: When its first token came.
        made: Tokens given so far, as of the engine's last look.
    """

    __slots__ = (
        "admitted",
        "ask",
        "at_ms",
        "begun_ms",
        "beside",
        "due_step",
        "end_ms",
        "first_ms",
        "hops",
        "input_tokens",
        "kv_usage",
        "made",
        "max_output_tokens",
        "number",
        "origin",
        "output_tokens",
        "place",
        "prefill_left",
        "read",
        "sent_ms",
        "taken_ms",
        "worker",
    )

    def __init__(
        self, number: int, at_ms: float, ask: Ask, input_tokens: int, output_tokens: int, max_output_tokens: int
    ) -> None:
        self.number, self.at_ms, self.ask = number, at_ms, ask
        self.input_tokens, self.output_tokens, self.max_output_tokens = input_tokens, output_tokens, max_output_tokens
        self.sent_ms = self.taken_ms = self.begun_ms = self.first_ms = self.end_ms = NEVER_MS
        self.worker = ""
        self.place = (0, 0)  # partition and offset of the engine's topic
        self.origin: tuple[str, int, int] | None = None  # the record that the client produced
        self.hops = self.beside = 0
        self.kv_usage = 0.0
        self.reset()

    def reset(self) -> None:
        """Nothing of it is on an engine: a run that was lost begins anew."""
        self.first_ms = self.begun_ms = NEVER_MS
        self.made = self.read = self.prefill_left = self.due_step = self.admitted = 0

    @property
    def deadline_ms(self) -> float:
        """After this moment no answer is wanted."""
        return self.at_ms + self.ask.deadline_ms if self.ask.deadline_ms is not None else NEVER_MS

    @property
    def ttft_ms(self) -> float:
        """From its arrival to its first token."""
        return self.first_ms - self.at_ms

    @property
    def tpot_ms(self) -> float:
        """Mean time between tokens; 0 where there was one only."""
        return (self.end_ms - self.first_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def latency_ms(self) -> float:
        """From its arrival to its end."""
        return self.end_ms - self.at_ms
