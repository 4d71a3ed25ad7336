"""What happens in one run of the simulation: drawn from its seed, and from nothing else."""

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from schemas import codecs, parse_config
from schemas.config import Config
from schemas.control import Cancel
from schemas.messages import InferenceRequest

TENANTS = ("t0", "t1", "t2", "t9")  # the last has ids of the others'
EPOCH_MS = 1_700_000_000_000
HEAL_MS = 2_600
POISON = "poison"  # in a prompt: the request kills whoever runs it
PATIENCE = {"stall_timeout_ms": 1_200, "abort_timeout_ms": 300}
FAULTS_FROM_MS = 150
STEPS = ("init", "produce", "offsets", "end", "committed", "bounds", "heartbeat", "poll", "send", "join")
CLOCK_STEPS_MS = (-3_600_000, -20_000, -700, 700, 20_000, 3_600_000)


@dataclass(frozen=True)
class Asked:
    """One request of a client.

    Attributes:
        at_ms: When it is produced.
        service_class: To which topic.
        request: What is in it.
    """

    at_ms: int
    service_class: str
    request: InferenceRequest

    @property
    def value(self) -> bytes:
        return codecs.encode(self.request)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at_ms: When.
        kind: What; a method of the world.
        victim: The process it befalls: `d0`, `w1`; empty where it befalls none in particular.
        length_ms: For how long.
        options: What else there is to say.
    """

    at_ms: int
    kind: str
    victim: str = ""
    length_ms: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """One run."""

    seed: int
    config: Config
    dispatchers: int
    workers: tuple[str, ...]  # the engine of each
    asked: tuple[Asked, ...]
    cancels: tuple[tuple[int, Cancel], ...]  # when, and what
    faults: tuple[Fault, ...]
    heal_ms: int


def scenario(seed: int) -> Scenario:
    """Draw a run."""
    dice = random.Random(f"{seed}/scenario")
    engines = ["sim"] if dice.random() < 0.7 else ["sim", "other"]
    dispatchers = dice.choice((1, 2, 2))
    workers = tuple(engines[n % len(engines)] for n in range(dice.choice((2, 2, 3))))
    config = _config(dice, engines, random.Random(f"{seed}/lanes"))
    asked = tuple(sorted(_asked(dice), key=lambda one: one.at_ms))
    cancels = tuple(_cancel(dice, asked) for _ in range(dice.choice((0, 0, 1, 4))))
    names = [f"d{n}" for n in range(dispatchers)] + [f"w{n}" for n in range(len(workers))]
    faults = sorted((_fault(dice, names) for _ in range(dice.randint(2, 8))), key=lambda fault: fault.at_ms)
    return Scenario(seed, config, dispatchers, workers, asked, cancels, tuple(faults), HEAL_MS)


def _config(dice: random.Random, engines: list[str], lanes: random.Random) -> Config:
    hop = {
        "unfinished_max": dice.choice((1, 3, 400)),
        "in_flight_max": dice.choice((4, 16_000)),
        "commit_timeout_ms": 1_800,
    }
    slots = dice.choice((1, 2, 4))
    options = {
        "ttft_ms": dice.choice((2, 20, 60)),
        "tpot_ms": dice.choice((3, 8, 30)),
        "fail_every": dice.choice((0, 0, 3, 7)),
        "kill_on": POISON,
    }
    engine = {"kind": "sim", "slots": slots, "options": options}
    return parse_config(
        {
            "kafka": {
                "connect_timeout_ms": 1_000,
                "request_timeout_ms": 1_500,
                "session_timeout_ms": 600,
                "heartbeat_ms": 100,
                "rebalance_timeout_ms": 300,
                "transaction_timeout_ms": 500,
            },
            "topics": {
                "request_partitions": dice.choice((1, 2)),
                "engine_partitions": dice.choice((2, 3, 4)),
                "retry_partitions": 1,
                "lane_partitions": lanes.choice((1, 4, 8)),
                "result_partitions": dice.choice((1, 2)),
            },
            "dispatcher": {
                "hop": hop,
                "runway_factor": dice.choice((1.0, 1.5, 3.0)),
                "status_stale_ms": 600,
                "status_poll_ms": 200,
                "max_attempts": 20,
                "retry_backoff_ms": 20,
                "retry_backoff_ms_max": 200,
                "failover_timeout_ms": 1_000,
                "trim_interval_ms": dice.choice((400, 60_000)),
                "lanes": {
                    "records_max": lanes.choice((1, 2, 3, 200)),
                    "bytes_max": lanes.choice((100, 2**25)),
                    "hold_ms": lanes.choice((200, 60_000)),
                },
            },
            "worker": {"hop": hop, "heartbeat_ms": 200, "chunk_ms": 15, "drain_ms": 1_000, **PATIENCE},
            "engines": dict.fromkeys(engines, engine),
        }
    )


def _asked(dice: random.Random) -> list[Asked]:
    asked = []
    span_ms = dice.choice((300, 1_200, 2_000))
    poisons = dice.choice((0, 0, 0, 0, 1, 2))
    late = dice.choice((0.0, 0.0, 0.2))
    for n in range(dice.randint(10, 40)):
        request = InferenceRequest(
            id=None if dice.random() < 0.1 else f"r{n}",
            tenant=TENANTS[dice.randrange(3)],
            prompt=f"{POISON} {n}" if n < poisons else f"say {n}",
            max_output_tokens=dice.randint(1, 24),
            stream=dice.random() < 0.4,
            deadline=datetime.fromtimestamp((EPOCH_MS + dice.randrange(300, 5_000)) / 1000, UTC)
            if dice.random() < late
            else None,
        )
        service_class = dice.choice(("interactive", "interactive", "batch"))
        asked.append(Asked(dice.randrange(span_ms), service_class, request))
        if request.id and dice.random() < 0.05:  # the client sends it again, or another tenant has the same id
            tenant = dice.choice((request.tenant, TENANTS[-1]))
            again = structs.replace(request, tenant=tenant, stream=request.stream and tenant == request.tenant)
            asked.append(Asked(dice.randrange(span_ms), service_class, again))
    return asked


def _cancel(dice: random.Random, asked: tuple[Asked, ...]) -> tuple[int, Cancel]:
    """One that comes before its request is read, or while it waits or runs, or after all that."""
    one = dice.choice(asked)
    at_ms = max(one.at_ms + dice.randrange(-100, 1_500), 0)
    if one.request.id is None or dice.random() < 0.1:
        return at_ms, Cancel(tenant=one.request.tenant)
    return at_ms, Cancel(id=one.request.id, tenant=dice.choice((None, one.request.tenant)))


def _fault(dice: random.Random, names: list[str]) -> Fault:
    at_ms = dice.randrange(FAULTS_FROM_MS, HEAL_MS - 200)
    victim = dice.choice(names)
    worker = dice.choice([name for name in names if name[0] == "w"])
    kind = dice.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    length_ms = int(dice.choice((60, 300, 900, 1_600)) * (0.5 + dice.random()))
    options: dict[str, Any] = {}
    if kind in {"kill", "pause"}:
        options = {"after": dice.choice((0, 0, dice.randrange(80)))}
    elif kind in {"kill_at", "pause_at"}:
        moment = dice.choice(("before", "after"))
        options = {"operation": dice.choice(STEPS), "moment": moment, "nth": dice.choice((0, 0, 1, dice.randrange(12)))}
    elif kind == "lose_at":
        victim, options = (
            "",
            {"operation": dice.choice((*STEPS, "end", "end")), "moment": dice.choice(("before", "after", "after"))},
        )
        options |= {"times": dice.choice((1, 3, 8)), "every": dice.choice((1, 3))}
    elif kind == "flaky":
        options = {
            "lost": dice.choice((0.02, 0.1, 0.4)),
            "unheard": dice.choice((0.02, 0.1, 0.4)),
            "late": dice.choice((0.0, 0.1)),
        }
    elif kind == "slow":
        options = {"share": dice.choice((0.1, 0.5)), "delay_ms": dice.choice((5, 50, 400))}
    elif kind == "coordinator":
        options = {"of": dice.choice(("group", "transactions")), "share": dice.choice((0.3, 0.6))}
    elif kind == "clock":
        options = {"step_ms": dice.choice(CLOCK_STEPS_MS), "everywhere": dice.random() < 0.3}
    elif kind == "scale_down":
        options = {"dies": dice.random() < 0.5}
    elif kind == "engine_slow":
        options = {"factor": dice.choice((3, 20))}
    if kind.startswith("engine") or kind == "scale_down":
        victim = worker
    return Fault(at_ms, kind, victim, length_ms, options)


_WEIGHTS = {
    "kill": 5,
    "kill_at": 5,
    "pause": 4,
    "pause_at": 3,
    "flaky": 3,
    "lose_at": 5,
    "slow": 2,
    "broker_down": 2,
    "coordinator": 2,
    "come": 2,
    "leave": 2,
    "redis_gone": 2,
    "redis_wiped": 1,
    "clock": 2,
    "engine_slow": 1,
    "engine_loses": 1,
    "engine_hangs": 1,
    "engine_dies": 2,
    "scale_down": 1,
    "pool_goes": 2,
}
