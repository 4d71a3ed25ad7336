"""Identifiers: ULIDs, fresh ones for clients and derived ones for records that came without."""

import hashlib

from ulid import ULID

_ULID_TIME_MAX_MS = 2**48 - 1


def new_id() -> str:
    """Make a fresh ULID."""
    return str(ULID())


def derived_id(topic: str, partition: int, offset: int, timestamp_ms: int) -> str:
    """Make the ULID of a record that came without an id: the same record always gets the same one."""
    digest = hashlib.blake2b(f"{topic}/{partition}/{offset}".encode(), digest_size=10).digest()
    time = min(max(timestamp_ms, 0), _ULID_TIME_MAX_MS)
    return str(ULID.from_bytes(time.to_bytes(6, "big") + digest))


def derived_seed(request_id: str) -> int:
    """Make the seed of a request that names none, so that a second run draws the same tokens."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big") >> 33
