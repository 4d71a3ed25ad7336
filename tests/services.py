"""The services that tests run against, started once per session and shared; each test uses names of its own."""

from collections.abc import Iterator

import pytest

from deploy.local.services import Services, services


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Apache Kafka, with Valkey beside it."""
    with services(tmp_path_factory.mktemp("kafka"), "kafka") as running:
        yield running


@pytest.fixture(scope="session")
def tansu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Tansu, which has no transactions, with a Valkey beside it."""
    with services(tmp_path_factory.mktemp("tansu"), "tansu") as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(tansu: Services) -> str:
    """An address of a Valkey; the lightest that is there."""
    return tansu.redis
