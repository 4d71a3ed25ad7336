"""Time slices for vLLM: its core process holds the turn at the device during each step.

This is the scheduler that vLLM's core is told to use. The core asks it what the next step consists of, runs that, and hands it
what came of it: between these two the device is used. The core waits for its turn inside of `schedule`, in its main thread;
requests and aborts that come meanwhile are taken in after that step. One step at a time: vLLM's way to prepare a step while
the one before it still runs (`async_scheduling`) would use the device beyond the end of a turn, and is switched off.

It is imported in the core process only, which has vLLM.
"""

from typing import Any

import msgspec
from vllm.v1.core.sched.scheduler import Scheduler

from engine_consumers.transformer.options import SLICES
from engine_consumers.turns import SharedTurn
from schemas.config import TimeSlicesConfig


class SlicedScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler, which takes turns."""

    def __init__(self, *given: Any, **named: Any) -> None:  # noqa: ANN401 - vLLM's, passed on
        super().__init__(*given, **named)
        self._turn = SharedTurn(msgspec.convert(self.vllm_config.additional_config[SLICES], TimeSlicesConfig))

    def schedule(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        """Wait for the turn where there is something to do, and say what the step consists of."""
        has_work = self.has_unfinished_requests()
        if has_work:
            self._turn.__enter__()
        step = super().schedule(*given, **named)
        if not has_work or not step.total_num_scheduled_tokens:  # all that is left waits for something else than the device
            self._turn.rest()
        self._turn.computed(step.total_num_scheduled_tokens)
        return step

    def update_from_output(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        """Take in what came of the step, which is over."""
        outputs = super().update_from_output(*given, **named)
        if self.has_unfinished_requests():
            self._turn.__exit__()
        else:
            self._turn.rest()
        return outputs

    def shutdown(self) -> None:
        """Take part no more."""
        self._turn.close()
        super().shutdown()
