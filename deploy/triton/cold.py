"""Experts that are kept in host memory, and how they come to a place on the device.

Copies are made one after the other, beside the computing: on a GPU in a stream of their own, on a CPU, where the device's
memory is the host's, in a thread. A place is written only after what was computed from it before.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Weights(NamedTuple):
    """One expert.

    Attributes:
        into: The gate's rows and those beside it, [2 x inner, hidden].
        out: [hidden, inner].
    """

    into: Tensor
    out: Tensor

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(one.numel() * one.element_size() for one in self)


class Cold(Protocol):
    """One expert in host memory."""

    def write(self, place: Weights) -> None:
        """Bring it to a place."""


class AsItIs:
    """An expert in the type that it is computed in: a place holds the same numbers whenever it is brought there.

    Args:
        weights: In host memory.
        is_pinned: Whether a GPU is to read them by itself.
    """

    def __init__(self, weights: Weights, *, is_pinned: bool) -> None:
        self._weights = Weights(*(one.pin_memory() for one in weights)) if is_pinned else weights

    def write(self, place: Weights) -> None:
        """See `Cold.write`."""
        for target, source in zip(place, self._weights, strict=True):
            target.copy_(source, non_blocking=True)


class InEightBits:
    """An expert in 8 bits and a scale for each row: a weight is off by at most 1/254 of the greatest of its row.

    What is computed is what the 8 bits say wherever the expert comes from, so tokens do not depend on what is resident.

    Args:
        weights: In host memory.
        is_pinned: Whether a GPU is to read them by itself.
    """

    def __init__(self, weights: Weights, *, is_pinned: bool) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []
        for one in weights:
            wide = one.float()
            scales = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-12)
            pair = (wide / scales).round().to(torch.int8), scales
            self._parts.append((pair[0].pin_memory(), pair[1].pin_memory()) if is_pinned else pair)

    def write(self, place: Weights) -> None:
        """See `Cold.write`."""
        for target, (whole, scales) in zip(place, self._parts, strict=True):
            near = whole.to(target.device, non_blocking=True)
            target.copy_(near.float() * scales.to(target.device, non_blocking=True))


class Copy(Protocol):
    """One copy that was begun."""

    def is_done(self) -> bool:
        """Whether it is over."""

    def wait(self) -> None:
        """Wait until it is."""


class Copier(Protocol):
    """Makes copies in the order in which they are begun."""

    def begin(self, work: Callable[[], None]) -> Copy:
        """Begin one."""

    def settle(self) -> None:
        """Wait for all."""

    def release(self) -> None:
        """Give memory that nobody uses any more back to the device."""


class _OfThread:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


class ThreadCopier:
    """Copies in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "forebay-experts")

    def begin(self, work: Callable[[], None]) -> Copy:
        """See `Copier.begin`."""
        return _OfThread(self._thread.submit(work))

    def settle(self) -> None:
        """See `Copier.settle`."""
        self._thread.submit(lambda: None).result()

    def release(self) -> None:
        """See `Copier.release`; Python has done so."""


class _OfStream:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopier:
    """Copies in a stream of a GPU."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def begin(self, work: Callable[[], None]) -> Copy:
        """See `Copier.begin`."""
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still compute with what the place held
        with torch.cuda.stream(self._stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return _OfStream(event)

    def settle(self) -> None:
        """See `Copier.settle`."""
        self._stream.synchronize()

    def release(self) -> None:
        """See `Copier.release`."""
        torch.cuda.empty_cache()
