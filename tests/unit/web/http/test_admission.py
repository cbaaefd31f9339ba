"""How many connections VMs and operators may have."""

import pytest

from forewarn.config import Config, Identify
from forewarn.web.http.admission import share_descriptors


def shares(descriptors: int, config: Config = Config()) -> tuple[int, int, int, int]:  # noqa: B008, frozen
    """Connections of VMs, of one VM's address, of operators, and of one operator's address."""
    vms, operators = share_descriptors(config, descriptors)
    return (
        vms.connections_max,
        vms.connections_per_address_max,
        operators.connections_max,
        operators.connections_per_address_max,
    )


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (256, (160, 20, 32, 32)),
        (1024, (640, 80, 128, 128)),
        (20_000, (14_880, 1860, 1024, 1024)),
        (524_288, (519_168, 4096, 1024, 1024)),
    ],
)
def test_vms_leave_descriptors_for_operators_and_the_store(
    descriptors: int, expected: tuple[int, int, int, int]
) -> None:
    """Without any, nobody could look, nothing could be stored, and impacts would fail."""
    assert shares(descriptors) == expected


@pytest.mark.parametrize(
    "identify", [(Identify.PROXY,), (Identify.ADDRESS, Identify.PROXY), (Identify.PATH,)]
)
def test_address_of_a_proxy_may_hold_all_connections(
    identify: tuple[Identify, ...],
) -> None:
    """A metadata proxy has one address for all VMs behind it."""
    assert shares(1024, Config(identify=identify))[:2] == (640, 640)


def test_configured_limit_per_address_applies_if_lower() -> None:
    assert shares(1024, Config(connections_per_address_max=7)) == (640, 7, 128, 7)
