"""What was changed of tenants and engines while it runs: the control topic's settings, merged in the order of the log.

Changes build on one another, so that the old ones cannot be deleted as cancels are. Before they are, somebody writes all
that holds anew as one `KeptSettings`, which says below which offset it stands for everything; what was written from there
on, before it or behind it, holds on top of it. So a change that crosses it on the way is not undone, every reader comes to
the same wherever it began, and of several such records, whoever wrote them, the one of the highest offset counts.

A change that would make a setting that no configuration may have is passed over by everybody.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import UNSET, structs

from schemas.config import Config
from schemas.control import NONE, Change, KeptSettings, PoolPatch, TenantPatch, TenantSettings
from schemas.policy import PoolSettings, TenantConfig

S = TypeVar("S", TenantConfig, PoolSettings)

KEEP_FROM_CHANGES = 1_000  # so many are not held one by one for long: they are kept anew

_PLAIN_TENANT = TenantConfig()
_PLAIN_POOL = PoolSettings()
_RATES = ("requests_per_s", "tokens_per_s")


class Settings:
    """The settings that hold.

    Args:
        config: What they change, and of how many.

    Attributes:
        version: Changes whenever what holds may have changed.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kept = KeptSettings(0)  # the last that counts
        self._since: list[tuple[int, Change]] = []  # all changes from the offset on that it stands for
        self._tenants: dict[str, TenantPatch] = {}
        self._pools: dict[str, PoolPatch] = {}
        self.version = 0

    def __len__(self) -> int:
        """Tenants and pools of which anything is set."""
        return len(self._tenants) + len(self._pools)

    # -- what holds ---------------------------------------------------------------------------------------------------

    @property
    def tenant_patches(self) -> Mapping[str, TenantPatch]:
        """What was set of each tenant that has anything set, by name."""
        return dict(sorted(self._tenants.items()))

    @property
    def pool_patches(self) -> Mapping[str, PoolPatch]:
        """What was set of each pool that has anything set, by name."""
        return dict(sorted(self._pools.items()))

    def tenants(self) -> dict[str, TenantConfig]:
        """The whole settings of all tenants of which anything is set, by name."""
        found = {name: self._tenant(name, patch) for name, patch in self.tenant_patches.items()}
        return {name: made for name, made in found.items() if _fault(made) is None}

    def pools(self) -> dict[str, PoolSettings]:
        """The whole settings of all pools of the configuration of which anything is set, by name."""
        known = self._config.pools
        return {name: _over(self.pool_base(name), patch) for name, patch in self.pool_patches.items() if name in known}

    def tenant_base(self, tenant: str) -> TenantConfig:
        """What the configuration says of a tenant."""
        return self._config.tenants.get(tenant, _PLAIN_TENANT)

    def pool_base(self, pool: str) -> PoolSettings:
        """What the configuration says of a pool: its first engine, by name."""
        engines = self._config.engines
        names = [name for name in sorted(engines) if self._config.pool(name) == pool]
        return engines[names[0]].settings if names else _PLAIN_POOL

    def pool_of(self, engine: str) -> str:
        """The pool that an engine's, or a pool's, name means."""
        if engine in self._config.pools or engine not in self._config.engines:
            return engine
        return self._config.pool(engine)

    # -- the log ------------------------------------------------------------------------------------------------------

    def restart(self, first: int) -> None:
        """The log is read anew from its first record: forget all."""
        self._kept, self._since = KeptSettings(first), []
        self._tenants, self._pools = {}, {}
        self.version += 1

    def add(self, record: Change | KeptSettings, offset: int) -> str | None:
        """Take in a control record, in the order of the log, each once.

        Returns:
            Why it was passed over, or None.
        """
        if isinstance(record, KeptSettings):
            return self._keep(record, offset)
        self._since.append((offset, record))
        return self._change(record)

    def refusal(self, change: Change) -> str | None:
        """Say why a change would be passed over, or None."""
        held: Mapping[str, Any]
        if isinstance(change, TenantSettings):
            name, held, patch = change.tenant, self._tenants, _merged(self._tenants.get(change.tenant, TenantPatch()), change)
        else:
            name, held = self.pool_of(change.engine), self._pools
            patch = _merged(held.get(name, PoolPatch()), change)
        bound = self._config.dispatcher.steered_max
        if name not in held and _says_something(patch) and len(held) >= bound:
            kind = "tenants" if isinstance(change, TenantSettings) else "engines"
            return f"the settings of {bound} {kind} differ already (dispatcher.steered_max): reset some of them"
        return self._disagreement(name, patch) if isinstance(patch, TenantPatch) else None

    # -- keeping ------------------------------------------------------------------------------------------------------

    def must_be_kept(self, before_offset: int) -> bool:
        """Whether deleting all records below an offset would lose settings that are not written anew yet."""
        if self._kept.as_of >= before_offset:
            return False
        holds = bool(self._kept.tenants or self._kept.pools)
        return holds or any(offset < before_offset for offset, _ in self._since)

    @property
    def are_many(self) -> bool:
        """Whether it is time to write them anew for their number alone."""
        return len(self._since) > KEEP_FROM_CHANGES

    def kept(self, as_of: int) -> KeptSettings:
        """All that holds, as one record.

        Args:
            as_of: The offset below which all records were added.
        """
        return KeptSettings(as_of, dict(self.tenant_patches), dict(self.pool_patches))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _keep(self, record: KeptSettings, offset: int) -> str | None:
        if record.as_of > offset:
            return f"it says that it stands for offsets below {record.as_of}, and lies at {offset}"
        if record.as_of < self._kept.as_of:
            return None  # whoever wrote it knew less
        self._kept = record
        self._since = [(at, change) for at, change in self._since if at >= record.as_of]
        self._tenants, self._pools = dict(record.tenants), dict(record.pools)
        for _, change in self._since:
            self._change(change)
        self.version += 1
        return None

    def _change(self, change: Change) -> str | None:
        reason = self.refusal(change)
        if reason is not None:
            return reason
        if isinstance(change, TenantSettings):
            _put(self._tenants, change.tenant, _merged(self._tenants.get(change.tenant, TenantPatch()), change))
        else:
            pool = self.pool_of(change.engine)
            _put(self._pools, pool, _merged(self._pools.get(pool, PoolPatch()), change))
        self.version += 1
        return None

    def _disagreement(self, tenant: str, patch: TenantPatch) -> str | None:
        """Say what is wrong with a tenant's whole setting, by itself and beside all others, or None."""
        wanted, before = self._tenant(tenant, patch), self._tenant(tenant, self._tenants.get(tenant, TenantPatch()))
        if (fault := _fault(wanted)) is not None:
            return fault
        for rate in _RATES:
            limit, guaranteed = getattr(self._config.dispatcher.cell, f"{rate}_max"), getattr(wanted, rate) or 0.0
            if limit is None or guaranteed <= (getattr(before, rate) or 0.0):
                continue
            others = {**self._config.tenants, **self.tenants()}
            total = sum(getattr(one, rate) or 0.0 for name, one in others.items() if name != tenant) + guaranteed
            if total > limit:
                return f"`{rate}`: all tenants together would be guaranteed {total:g}, and the cell has {limit:g}"
        return None

    def _tenant(self, tenant: str, patch: TenantPatch) -> TenantConfig:
        return _over(self.tenant_base(tenant), patch)


def _merged(held: Any, change: Any) -> Any:  # noqa: ANN401 - patches of a tenant or of a pool
    """What is set once a change is made; what goes back to the configuration's is not set."""
    kind = type(held)
    if change.reset:
        held = kind()
    changed = {name: getattr(change, name) for name in kind.__struct_fields__}
    changed = {name: UNSET if value is None else value for name, value in changed.items() if value is not UNSET}
    return structs.replace(held, **changed)


def _over(base: S, patch: TenantPatch | PoolPatch) -> S:
    """The whole setting: what is set, and else what the configuration says."""
    given = {name: getattr(patch, name) for name in patch.__struct_fields__}
    given = {name: None if value == NONE else value for name, value in given.items() if value is not UNSET}
    return structs.replace(base, **given)


def _put(held: dict[str, Any], name: str, patch: Any) -> None:  # noqa: ANN401
    if _says_something(patch):
        held[name] = patch
    else:
        held.pop(name, None)


def _says_something(patch: TenantPatch | PoolPatch) -> bool:
    return patch != type(patch)()


def _fault(settings: TenantConfig) -> str | None:
    """Say what is wrong with a tenant's whole setting, or None."""
    for rate in _RATES:
        guaranteed, most = getattr(settings, rate), getattr(settings, f"{rate}_max")
        if guaranteed is not None and most is not None and guaranteed > most:
            return f"`{rate}`: expected at most its `{rate}_max` ({most:g}), got {guaranteed:g}"
    return None
