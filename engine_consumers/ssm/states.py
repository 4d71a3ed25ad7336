"""The states of all requests: allocated once, in rows that are packed so that a step needs no gathering.

    rows   0 .. decoding-1          requests that decode, without gaps: one step works on the first rows in place
           slots .. slots+readers-1 requests whose prompts are being read

A state is zeroed when a prompt begins to be read, and nowhere else. Once read it moves behind those that decode; where
one of these leaves, the last one moves into its row. So a row's place in memory never changes, as CUDA graphs need it,
and memory does not depend on how long a text is.
"""

from collections.abc import Sequence

from torch import Tensor


class States:
    """Convolution and recurrence states of all layers.

    Args:
        layers: Of each layer its two states, [slots + readers, ...] each, as the package allocates them.
        slots: Requests that decode at once.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        self._layers = list(layers)
        self.slots, self.readers = slots, layers[0][0].shape[0] - slots
        self.bytes: int = sum(one.numel() * one.element_size() for pair in layers for one in pair)

    @property
    def bytes_per_request(self) -> int:
        """What one request takes, however long it is."""
        share: int = self.bytes // (self.slots + self.readers)
        return share

    def rows(self, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Views of some rows, by layer."""
        return [(conv[first : first + count], ssm[first : first + count]) for conv, ssm in self._layers]

    def clear(self, row: int) -> None:
        """Zero a row."""
        for pair in self._layers:
            for one in pair:
                one[row].zero_()

    def move(self, source: int, target: int) -> None:
        """Copy a row onto another."""
        for pair in self._layers:
            for one in pair:
                one[target].copy_(one[source])
