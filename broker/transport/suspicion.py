"""Which requests kill whoever runs them: told by counting, kept in the ledger's notes and in the envelope.

A worker that dies takes everything in its hands down, so its neighbours are counted with the culprit. From `ALONE_FROM`
crashes on a request is a suspect and runs alone; from then on only a crash while it ran alone counts, so only the
culprit goes on to the bound. A partition that moves, and a worker that leaves in good order, count for nothing.
"""

from broker.transport.ledger import NOTE_MAX, Inherited

ALONE_FROM = 2
CRASHES_MAX = NOTE_MAX >> 1


def after_crash(crashes: int, *, alone: bool) -> int:
    """Count one more crash of whoever had the request in hand.

    Args:
        crashes: Counted so far.
        alone: Whether it ran, and nothing beside it.
    """
    return min(crashes + (crashes < ALONE_FROM or alone), CRASHES_MAX)


def crashes_of(carried: int, inherited: Inherited) -> int:
    """Give the crashes of a request that was just read.

    Args:
        carried: Those that its envelope tells of.
        inherited: What the ledger tells of its record.
    """
    if not inherited.takeovers:
        return carried
    crashes = max(inherited.note >> 1, carried)
    return after_crash(crashes, alone=bool(inherited.note & 1)) if inherited.crashed else crashes


def note_of(crashes: int, *, alone: bool) -> int:
    """Give the note that keeps the count while the request is in hand."""
    return crashes << 1 | alone
