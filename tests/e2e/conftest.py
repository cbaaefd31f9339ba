"""One service for all tests of a worker that neither stop nor configure it."""

from collections.abc import Iterator

import pytest

from tests.e2e.cli_service import Service, serving


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Tests must leave its fleet and events as they were."""
    with serving(tmp_path_factory.mktemp("service"), "--identify", "path") as running:
        yield running
