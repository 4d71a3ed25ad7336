"""The admin client over aiokafka."""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code
from aiokafka.structs import TopicPartition as KafkaPartition

from broker.transport.errors import TransportError
from broker.transport.kafka.control import Control
from broker.transport.kafka.link import bootstrap, client_settings, deadline, let_go
from broker.transport.members import by_client
from broker.transport.protocol import TopicPartition
from broker.transport.topic_plan import Existing, TopicPlan, plan_topic
from schemas.config import KafkaConfig
from schemas.topics import TopicSpec

log = logging.getLogger("forebay.kafka")

LOOK_S = 0.1
ENSURE_MS = 60_000
SETTLE_S = 20.0
NOT_DONE = "NOT done"
_SETTLED = ("Stable", "Empty", "Dead")
_OF_TOPIC = 1  # where a setting comes from: the topic itself, not the broker's defaults


class KafkaAdmin:
    """Looks after topics."""

    def __init__(self, config: KafkaConfig, control: Control) -> None:
        self._config, self._control = config, control
        self._inner: AIOKafkaAdminClient | None = None
        self._can_trim = True
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def start(self) -> None:
        """Connect.

        Raises:
            Unreachable: With the address and what to do.
        """
        inner = AIOKafkaAdminClient(**client_settings(self._config), client_id="forebay-admin")
        self._inner = inner
        await bootstrap(inner._client, self._config)
        async with deadline(self._config.request_timeout_ms, "starting an admin client"):
            await inner.start()

    async def partitions(self, topic: str) -> int | None:
        """See the protocol."""
        return await self._control.partitions(topic)

    async def ensure(self, topics: Sequence[TopicSpec], replication: int, min_insync: int) -> list[str]:
        """See the protocol."""
        async with deadline(ENSURE_MS, "making topics"):
            existing = await self._existing([spec.name for spec in topics])
            plans = {spec.name: plan_topic(spec, existing.get(spec.name), replication, min_insync) for spec in topics}
            lines = [*await self._create(plans, replication), *await self._grow(plans), *await self._alter(plans)]
            undone = {word.strip(":") for line in lines if line.startswith(NOT_DONE) for word in line.split()}
            changed = [spec for spec in topics if plans[spec.name].lines and spec.name not in undone]
            try:
                async with asyncio.timeout(SETTLE_S):
                    await self._until_so(changed, min_insync)
            except TimeoutError:  # another process may wish for something else
                log.warning("topics_unsettled topics=%s", ",".join(spec.name for spec in changed))
            return lines

    async def compare(self, topics: Sequence[TopicSpec], min_insync: int) -> list[TopicPlan]:
        """See the protocol."""
        async with deadline(self._config.request_timeout_ms, "looking at topics"):
            existing = await self._existing([spec.name for spec in topics])
        return [plan_topic(spec, existing.get(spec.name), 1, min_insync) for spec in topics]

    async def members(self, group: str) -> dict[str, tuple[TopicPartition, ...]]:
        """See the protocol."""
        async with deadline(self._config.request_timeout_ms, f"waiting for group {group} to settle"):
            while True:
                try:
                    (response,) = await self._admin.describe_consumer_groups([group])
                except KafkaError as error:  # on a fresh cluster no coordinator is there yet
                    if not error.retriable:
                        raise
                    await asyncio.sleep(LOOK_S)
                    continue
                ((code, _, state, _, _, members, *_),) = response.groups
                if not for_code(code).retriable:
                    _must_be_well(code, f"reading who owns what in group {group}")
                if for_code(code) is NoError and state in _SETTLED:
                    return by_client((client_id, _owned(group, assignment)) for _, client_id, _, _, assignment, *_ in members)
                await asyncio.sleep(LOOK_S)

    async def trim(self, before: Mapping[TopicPartition, int]) -> None:
        """See the protocol."""
        if not before or not self._can_trim:
            return
        bounds = await self._control.bounds(list(before))
        wanted = {
            KafkaPartition(*tp): RecordsToDelete(before_offset=min(offset, bounds[tp][1]))
            for tp, offset in before.items()
            if bounds[tp][0] < min(offset, bounds[tp][1])
        }
        if not wanted:
            return
        try:
            async with deadline(self._config.request_timeout_ms, "deleting records"):
                await self._admin.delete_records(wanted)
        except TransportError as error:
            if self._config.delivery == "exactly_once":  # a broker that has transactions can do it, at another time
                raise
            self._can_trim = False
            log.warning("trim_unsupported bootstrap=%s error=%s", self._config.bootstrap, error)

    async def close(self) -> None:
        """See the protocol."""
        self._closed = True
        inner, self._inner = self._inner, None
        if inner is not None:
            await let_go("admin", inner.close, inner._client, lambda: ())

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _admin(self) -> AIOKafkaAdminClient:
        if self._inner is None:
            message = "the admin client is closed"
            raise TransportError(message)
        return self._inner

    async def _described(self) -> dict[str, list[Any]]:
        """Topic -> its partitions as the broker describes them; asked without creating anything."""
        return {topic["topic"]: topic["partitions"] for topic in await self._admin.describe_topics()}

    async def _existing(self, names: Sequence[str]) -> dict[str, Existing]:
        described = await self._described()
        found = [name for name in names if name in described]
        settings = await self._settings(found)
        return {name: Existing(len(described[name]), {n: v for n, (v, _) in settings[name].items()}) for name in found}

    async def _settings(self, names: Sequence[str]) -> dict[str, dict[str, tuple[str, bool]]]:
        """Topic -> setting -> value in force, and whether the topic has it of its own."""
        result: dict[str, dict[str, tuple[str, bool]]] = {name: {} for name in names}
        if not names:
            return result
        for response in await self._admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names]):
            for code, told, _, name, entries in response.resources:
                _must_be_well(code, f"reading the settings of topic {name}", told)
                result[name] = {entry[0]: (entry[1] or "", entry[3] == _OF_TOPIC) for entry in entries}
        return result

    async def _create(self, plans: Mapping[str, TopicPlan], replication: int) -> list[str]:
        missing = {name: plan for name, plan in plans.items() if plan.create}
        if not missing:
            return []
        topics = [
            NewTopic(name, plan.partitions or 1, replication, topic_configs=dict(plan.settings)) for name, plan in missing.items()
        ]
        response = await self._admin.create_topics(topics)
        lines: list[str] = []
        for name, code, *told in response.topic_errors:
            if for_code(code) is TopicAlreadyExistsError:
                continue  # somebody else was faster
            _must_be_well(code, f"making topic {name}", *told)
            lines += missing[name].lines
        return lines

    async def _grow(self, plans: Mapping[str, TopicPlan]) -> list[str]:
        lines: list[str] = []
        for name, plan in plans.items():
            if plan.create or plan.partitions is None:
                continue
            growing = self._admin.create_partitions({name: NewPartitions(total_count=plan.partitions)})
            lines += await self._mended(plan.lines[:1], growing)
        return lines

    async def _alter(self, plans: Mapping[str, TopicPlan]) -> list[str]:
        changing = {name: plan for name, plan in plans.items() if plan.settings and not plan.create}
        if not changing:
            return []
        settings = await self._settings(list(changing))
        lines: list[str] = []
        for name, plan in changing.items():
            # The request replaces all of a topic's own settings, so those it has are sent along.
            kept = {setting: value for setting, (value, own) in settings[name].items() if own}
            resource = ConfigResource(ConfigResourceType.TOPIC, name, configs={**kept, **plan.settings})
            lines += await self._mended(plan.lines[-len(plan.settings) :], self._altered(resource))
        return lines

    async def _altered(self, resource: ConfigResource) -> None:
        for response in await self._admin.alter_configs([resource]):
            for code, told, _, name in response.resources:
                _must_be_well(code, f"setting up topic {name}", told)

    async def _mended(self, lines: Iterable[str], doing: Awaitable[Any]) -> list[str]:
        """Say what was done, or that this broker cannot do it."""
        try:
            async with asyncio.timeout(self._config.request_timeout_ms / 1000):
                await doing
        except (KafkaError, OSError, TransportError, NotImplementedError, TimeoutError) as error:
            return [f"{NOT_DONE}, this broker cannot: {line} ({type(error).__name__}: {error})" for line in lines]
        return list(lines)

    async def _until_so(self, changed: Sequence[TopicSpec], min_insync: int) -> None:
        """Wait until what was changed is in force and led: the broker hears of it a moment after the controller."""
        while changed:
            described = await self._described()
            existing = await self._existing([spec.name for spec in changed])
            changed = [
                spec
                for spec in changed
                if plan_topic(spec, existing.get(spec.name), 1, min_insync).lines or not _is_led(described.get(spec.name, []))
            ]
            if changed:
                await asyncio.sleep(LOOK_S)


def _is_led(partitions: Sequence[Any]) -> bool:
    return bool(partitions) and all(partition["leader"] >= 0 for partition in partitions)


def _owned(group: str, assignment: bytes) -> list[TopicPartition]:
    if not assignment:
        message = f"this broker does not tell what the members of group {group} own"
        raise TransportError(message)
    return [TopicPartition(*tp) for tp in ConsumerProtocol.ASSIGNMENT.decode(assignment).partitions()]


def _must_be_well(code: int, what: str, told: str | None = None) -> None:
    error = for_code(code)
    if error is not NoError:
        message = f"{what}: {error.__name__}: {told or error.description}"
        raise TransportError(message)
