"""How often a VM may call."""

from forewarn.web.http import rate_limit as pace
from forewarn.web.http.rate_limit import TokenBucket


def test_burst_is_limited_to_one_second() -> None:
    limit = TokenBucket(5)
    assert [limit.admits("web-0", 100.0) for _ in range(6)] == [True] * 5 + [False]


def test_bucket_refills_over_time() -> None:
    limit = TokenBucket(5)
    for _ in range(5):
        limit.admits("web-0", 100.0)
    assert limit.admits("web-0", 100.19) is False
    assert limit.admits("web-0", 100.21) is True
    assert limit.admits("web-0", 100.21) is False


def test_clients_have_separate_limits() -> None:
    limit = TokenBucket(1)
    assert limit.admits("web-0", 100.0)
    assert limit.admits("web-1", 100.0)


def test_rate_below_one_admits_the_first_request() -> None:
    limit = TokenBucket(0.1)
    assert [limit.admits("web-0", now) for now in (0.0, 9.0, 10.1)] == [True, False, True]


def test_idle_clients_are_forgotten() -> None:
    """The memory is that of the VMs that called within a second, however many there are."""
    limit = TokenBucket(5)
    for number in range(10 * pace.CLIENTS_MIN):
        limit.admits(f"vm-{number}", number * 0.001)
    assert len(limit._full_at) <= pace.CLIENTS_MIN
