"""Which partition a key belongs to: murmur2, as Java's producer, kafka-python's and aiokafka's have it.

librdkafka hashes otherwise by default: such producers set `partitioner=murmur2_random`.
"""

from functools import lru_cache
from struct import Struct

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Hash bytes as `org.apache.kafka.common.utils.Utils.murmur2` does, as an unsigned 32-bit number."""
    size = len(data)
    words = size >> 2
    h = _SEED ^ size
    for word in _words(words).unpack_from(data):
        k = word * _M & _MASK
        h = (h * _M & _MASK) ^ ((k ^ (k >> 24)) * _M & _MASK)
    tail = data[words << 2 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ (h >> 13)) * _M & _MASK
    return h ^ (h >> 15)


def partition_for(key: bytes, partitions: int) -> int:
    """Give the partition of a key in a topic of so many partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


@lru_cache(maxsize=256)
def _words(count: int) -> Struct:
    return Struct(f"<{count}I")
