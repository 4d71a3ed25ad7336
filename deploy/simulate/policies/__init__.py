"""Who gives requests to workers: Forebay's own core, and what it is compared with."""

from deploy.simulate.policies.registry import POLICIES, find_policy

__all__ = ["POLICIES", "find_policy"]
