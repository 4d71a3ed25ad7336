"""A hop's handler that does nothing of what it need not do."""


class IdleHandler:
    """What tests of a hop begin from; see `broker.transport.handler.Handler`."""

    def takes(self, partition):  # noqa: ARG002 - as the hop calls it
        return True

    def claim(self, record, inherited):
        pass

    def noted(self, work):
        pass

    def moved(self):
        pass

    def flush(self):
        pass

    def committed(self, work, places):
        pass
