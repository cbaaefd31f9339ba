"""Heads that the parser accepts and the service does not."""

import pytest

from forewarn.errors import Invalid
from forewarn.web.http.admission import Limits
from forewarn.web.http.head import check_head


def check(host: bytes) -> int:
    return check_head(b"/", [(b"host", host)], "1.1", Limits())


@pytest.mark.parametrize(
    "host",
    [b"a:b", b"a:1:b", b"a:-1", b"a:65536", b"a:99999999", b"::1", b"[::1]:x", b"[::1]:65536"],
)
def test_host_with_a_port_that_is_none_is_rejected(host: bytes) -> None:
    """RFC 9112, 3.2. Libraries raise when they parse it."""
    with pytest.raises(Invalid, match="a port of at most 65535 in the Host header"):
        check(host)


@pytest.mark.parametrize(
    "host", [b"", b"a", b"a:", b"a:80", b"a:65535", b"10.0.0.1:8081", b"[::1]", b"[::1]:80"]
)
def test_other_hosts_are_accepted(host: bytes) -> None:
    assert check(host) == 0
