"""Files of OpenAI batch lines, run on the cluster and taken up again after any interruption."""

from broker.batch.errors import BatchError, CannotStart, Stalled
from broker.batch.journal import Tally
from broker.batch.lines import Settings
from broker.batch.plan import Files, Plan
from broker.batch.runner import Limits, Progress, run_batch

__all__ = ["BatchError", "CannotStart", "Files", "Limits", "Plan", "Progress", "Settings", "Stalled", "Tally", "run_batch"]
