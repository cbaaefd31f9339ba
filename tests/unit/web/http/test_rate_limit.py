"""How often a VM may call."""

from forewarn.web.http import rate_limit as pace
from forewarn.web.http.rate_limit import TokenBucket


def test_a_vm_may_spend_one_seconds_worth_at_once_and_no_more() -> None:
    limit = TokenBucket(5)
    assert [limit.admits("web-0", 100.0) for _ in range(6)] == [True] * 5 + [False]


def test_what_was_spent_comes_back_one_by_one() -> None:
    limit = TokenBucket(5)
    for _ in range(5):
        limit.admits("web-0", 100.0)
    assert limit.admits("web-0", 100.19) is False
    assert limit.admits("web-0", 100.21) is True
    assert limit.admits("web-0", 100.21) is False


def test_one_vm_does_not_slow_another() -> None:
    limit = TokenBucket(1)
    assert limit.admits("web-0", 100.0)
    assert limit.admits("web-1", 100.0)


def test_less_than_one_a_second_still_admits_the_first() -> None:
    limit = TokenBucket(0.1)
    assert [limit.admits("web-0", moment) for moment in (0.0, 9.0, 10.1)] == [True, False, True]


def test_vms_that_have_not_called_for_a_while_are_forgotten() -> None:
    """The memory is that of the VMs that called within a second, however many there are."""
    limit = TokenBucket(5)
    for number in range(10 * pace.CLIENTS_MIN):
        limit.admits(f"vm-{number}", number * 0.001)
    assert len(limit._full_at) <= pace.CLIENTS_MIN
