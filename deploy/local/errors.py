"""Errors of the local stack; the text is one line that says what to do.

LocalStackError
├── NotAvailable    a part cannot be had on this machine: another may serve
├── NotReady        a part was started and does not answer
└── NotRunning      there is no stack in this home
"""


class LocalStackError(RuntimeError):
    """Base of this package's errors."""


class NotAvailable(LocalStackError):
    """A part cannot be had on this machine."""


class NotReady(LocalStackError):
    """A part was started and did not answer in time."""


class NotRunning(LocalStackError):
    """There is no stack in this home."""
