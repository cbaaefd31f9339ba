"""What the tests on real virtual machines share: the image that guests boot."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.guest_image import GuestImage, build_image


@pytest.fixture(scope="session")
def image() -> Iterator[GuestImage]:
    with tempfile.TemporaryDirectory(prefix="fw-image-") as folder:
        yield build_image(Path(folder))
