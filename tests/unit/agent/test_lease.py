"""One leader among many, by a file that all of them see."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.agent.lease import SECONDS, WORD_SECONDS_MAX, Keeper, Lease
from tests.unit.agent.agent_world import PATIENCE_SECONDS, Hands


class Storage:
    """Shared storage, and a clock for all who use it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lease"
        self.hands = Hands()
        self.touches = 0

    def lease(self, holder: str) -> Lease:
        return Lease(self.path, holder, monotonic=lambda: self.hands.monotonic)

    def touched(self) -> None:
        """As the holder's renewal looks on storage with a coarse clock: a later time."""
        self.touches += 1
        os.utime(self.path, (self.touches, self.touches))


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_the_first_to_ask_leads_and_goes_on_leading(storage: Storage) -> None:
    """Asking again renews."""
    one, other = storage.lease("web-0"), storage.lease("web-1")

    assert [one.hold(), other.hold(), one.hold(), other.hold()] == [True, False, True, False]


def test_a_holder_that_is_gone_is_followed_when_the_lease_has_lapsed_and_not_before(
    storage: Storage,
) -> None:
    """A VM that reboots cannot release; the others watch its lease stay untouched, each by its own
    clock.
    """
    storage.lease("web-0").hold()
    other = storage.lease("web-1")
    assert not other.hold()

    storage.hands.pass_(SECONDS - 1)
    assert not other.hold()
    storage.hands.pass_(1)
    assert other.hold()
    assert not storage.lease("web-0").hold(), "it is back, and finds another's name"


def test_a_lease_that_is_renewed_never_lapses(storage: Storage) -> None:
    """However long it is watched."""
    storage.lease("web-0").hold()
    other = storage.lease("web-1")
    for _ in range(10):
        assert not other.hold()
        storage.touched()
        storage.hands.pass_(SECONDS - 1)

    assert not other.hold()


def test_a_wrong_time_of_day_neither_ends_a_lease_nor_keeps_it(storage: Storage) -> None:
    """The storage's clock and ours are never compared: the file may be from the year 1970 or 2100."""
    storage.lease("web-0").hold()
    other = storage.lease("web-1")
    for seconds in (0, 4_102_444_800):
        os.utime(storage.path, (seconds, seconds))
        assert not other.hold()

    storage.hands.pass_(SECONDS)
    assert other.hold()


def test_of_two_that_want_to_follow_one_does(storage: Storage) -> None:
    """Both see it lapse at the same moment."""
    storage.lease("gone").hold()
    one, other = storage.lease("web-0"), storage.lease("web-1")
    one.hold()
    other.hold()
    storage.hands.pass_(SECONDS)

    assert [one.hold(), other.hold()] == [True, False]
    assert [one.hold(), other.hold()] == [True, False]


def test_a_holder_that_renews_at_the_last_moment_keeps_its_lease(storage: Storage) -> None:
    """It touches the file while another has just begun to take it over."""

    class Racing(Lease):
        def _create(self, path: Path) -> bool:
            is_created = super()._create(path)
            if path != storage.path:
                storage.touched()
            return is_created

    storage.lease("web-0").hold()
    other = Racing(storage.path, "web-1", monotonic=lambda: storage.hands.monotonic)
    other.hold()
    storage.hands.pass_(SECONDS)

    assert not other.hold()
    assert storage.path.read_text() == "web-0"
    assert not storage.path.with_name("lease.next").exists()


def test_one_that_died_while_taking_over_does_not_block_the_rest(storage: Storage) -> None:
    """Its mark beside the lease lapses as a lease does."""
    storage.lease("gone").hold()
    storage.path.with_name("lease.next").write_text("died")
    other = storage.lease("web-1")
    other.hold()
    storage.hands.pass_(SECONDS)
    assert not other.hold(), "the mark is seen for the first time"
    storage.hands.pass_(SECONDS)

    assert other.hold()


def test_a_released_lease_is_free_at_once(storage: Storage) -> None:
    """Nobody waits for a lapse after an orderly end. Only the holder can release."""
    one, other = storage.lease("web-0"), storage.lease("web-1")
    one.hold()
    other.release()
    assert not other.hold()

    one.release()
    assert other.hold()


def test_without_storage_nobody_leads(tmp_path: Path) -> None:
    """A share that is not mounted means: do not approve."""
    assert not Lease(tmp_path / "missing" / "lease", "web-0", monotonic=lambda: 0.0).hold()


class Hanging:
    """A lease that is ours, on storage that answers only while it is `well`."""

    def __init__(self) -> None:
        self.well = threading.Event()
        self.asked = threading.Event()
        self.released = threading.Event()

    def hold(self) -> bool:
        self.asked.set()
        return self.well.wait(PATIENCE_SECONDS)

    def release(self) -> None:
        self.released.set()


class Kept:
    """A keeper at work. `word` is set when it has a new one."""

    def __init__(self) -> None:
        self.hands, self.lease, self.word, self.stop = (
            Hands(),
            Hanging(),
            threading.Event(),
            threading.Event(),
        )
        self.keeper = Keeper(
            self.lease, monotonic=lambda: self.hands.monotonic, on_word=self.word.set
        )
        self.thread = threading.Thread(target=self.keeper.keep, args=(self.stop,), daemon=True)
        self.thread.start()


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.lease.well.set()
    kept.stop.set()
    kept.keeper.wake()
    kept.thread.join(PATIENCE_SECONDS)
    assert not kept.thread.is_alive()


def test_storage_that_hangs_is_waited_for_by_nobody_but_the_keeper(kept: Kept) -> None:
    """We do not lead until it has answered; then we do."""
    assert not kept.keeper.hold()
    assert kept.lease.asked.wait(PATIENCE_SECONDS)
    assert not kept.keeper.hold()

    kept.lease.well.set()
    assert kept.word.wait(PATIENCE_SECONDS)
    assert kept.keeper.hold()


def test_the_keepers_word_is_true_for_seconds_only(kept: Kept) -> None:
    """When the storage hangs later, the others may take the lease over without our knowing."""
    kept.lease.well.set()
    kept.keeper.hold()
    assert kept.word.wait(PATIENCE_SECONDS)
    kept.lease.well.clear()
    kept.lease.asked.clear()
    assert kept.lease.asked.wait(PATIENCE_SECONDS), "it renews by itself"
    kept.hands.pass_(WORD_SECONDS_MAX)

    assert not kept.keeper.hold()


def test_what_is_released_while_the_storage_hangs_is_released_when_it_is_well(kept: Kept) -> None:
    """And is not ours in between."""
    kept.keeper.hold()
    assert kept.lease.asked.wait(PATIENCE_SECONDS)
    kept.keeper.release()
    kept.lease.well.set()

    assert kept.lease.released.wait(PATIENCE_SECONDS)
