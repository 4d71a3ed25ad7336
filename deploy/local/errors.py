"""Errors of the local stack; the text is one line that says what to do.

LocalStackError
├── NotAvailable    a part cannot be had on this machine: another may serve
├── NotReady        a part was started and does not answer
├── NotRunning      there is no stack in this home
├── OtherStack      one runs already, and not as it was asked for
└── BrokenState     what a stack said of itself cannot be read
"""


class LocalStackError(RuntimeError):
    """Base of this package's errors."""


class NotAvailable(LocalStackError):
    """A part cannot be had on this machine."""


class NotReady(LocalStackError):
    """A part was started and did not answer in time."""


class NotRunning(LocalStackError):
    """There is no stack in this home."""


class OtherStack(LocalStackError):
    """A stack runs in this home already, and it is not the one that was asked for."""


class BrokenState(LocalStackError):
    """What a stack said of itself cannot be read."""
