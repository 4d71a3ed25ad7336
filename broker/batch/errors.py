"""Errors of batch files: what stops a run. What is wrong with a single line goes into the error file instead.

BatchError
├── CannotStart    the files do not fit the run that was begun, or another process works on them
└── Stalled        no answer came for too long, or the cluster stayed away; the run can be taken up again
"""


class BatchError(Exception):
    """Base of this package's errors."""


class CannotStart(BatchError):
    """The files at hand do not fit; the message names the file and what to do."""


class Stalled(BatchError):
    """Nothing went on for too long; what was reached is kept."""
