"""What has to be done so that a topic is as it should be: pure planning, carried out by each adapter's admin."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.topics import TopicSpec

MIN_INSYNC = "min.insync.replicas"


@dataclass(frozen=True)
class Existing:
    """A topic as it is; `settings` holds the values in force, those from the broker's defaults included."""

    partitions: int
    settings: Mapping[str, str]


@dataclass(frozen=True)
class TopicPlan:
    """The steps for one topic; nothing to do where all are empty.

    Attributes:
        create: Whether the topic is missing.
        partitions: Number of partitions to make or to grow to; None where there are enough.
        settings: Settings to make or to mend.
        lines: One line for each step, in the order create or grow, then settings.
    """

    create: bool
    partitions: int | None
    settings: Mapping[str, str]
    lines: tuple[str, ...]


def plan_topic(spec: TopicSpec, existing: Existing | None, replication: int, min_insync: int) -> TopicPlan:
    """Compare a topic with its specification; partitions are never taken away."""
    wanted = {**spec.settings, MIN_INSYNC: str(min_insync)}
    if existing is None:
        told = ", ".join(f"{name}={value}" for name, value in sorted(wanted.items()))
        line = f"created topic {spec.name}: {spec.partitions} partitions, replication {replication}, {told}"
        return TopicPlan(create=True, partitions=spec.partitions, settings=wanted, lines=(line,))
    lines = []
    partitions = None
    if existing.partitions < spec.partitions:
        partitions = spec.partitions
        lines.append(f"added partitions to topic {spec.name}: {existing.partitions} -> {spec.partitions}")
    changed = {name: value for name, value in wanted.items() if existing.settings.get(name) != value}
    lines += [
        f"set {name}={value} on topic {spec.name} (was {existing.settings.get(name, 'unset')})"
        for name, value in sorted(changed.items())
    ]
    return TopicPlan(create=False, partitions=partitions, settings=changed, lines=tuple(lines))
