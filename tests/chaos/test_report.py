"""The numbers of a report, from hand-made recordings."""

from msgspec.structs import replace

from tests.chaos.history import Call, Fault, HistoryEntry, Kind, Members, Recording, Run, Shown
from tests.chaos.report import find_late, measure, render

CUT = Fault("cut off", "s1", 20.0, 32.0, 33.0)
RUN = Run(
    seed=7,
    began_at=0.0,
    ended_at=60.0,
    servers=("s0", "s1"),
    notice_seconds={},
    fleet={"one": Members("any", ("one",))},
    faults=(CUT,),
)


def call(
    kind: Kind, asked_at: float, answered_at: float, status: int = 200, **more: object
) -> Call:
    fields = {"client": "c", "server": "s0", "scope": "one"} | more
    return Call(
        kind=kind,
        asked_at=asked_at,
        answered_at=answered_at,
        status=status,
        **fields,  # type: ignore[arg-type]
    )


def restart(event: str, asked_at: float, answered_at: float) -> Call:
    events = (Shown(event, "Scheduled", 99.0),)
    return call(Kind.RESTART, asked_at, answered_at, 202, events=events)


def wait(view: str, incarnation: int, answered_at: float, server: str = "s1") -> Call:
    asked_at = answered_at - 5
    return call(Kind.WAIT, asked_at, answered_at, server=server, incarnation=incarnation, view=view)


def recording(*calls: Call) -> Recording:
    views: dict[str, tuple[Shown, ...]] = {
        f"bytes-{event}": (Shown(event, "Scheduled", 99.0),) for event in "ABC"
    }
    return Recording(run=RUN, calls=calls, views=views)


def test_propagation_counts_from_the_request_and_from_the_response() -> None:
    (lag,) = measure(recording(restart("A", 10.0, 10.5), wait("bytes-A", 2, 10.75))).settled
    assert (lag.server, lag.since_request, lag.since_response) == ("s1", 0.75, 0.25)


def test_another_server_may_be_faster_than_the_response() -> None:
    (lag,) = measure(recording(restart("A", 10.0, 10.5), wait("bytes-A", 2, 10.25))).settled
    assert (lag.since_request, lag.since_response) == (0.25, 0.0)


def test_propagation_during_or_near_a_fault_is_stale_time_instead() -> None:
    numbers = measure(recording(restart("A", 21.0, 21.5), wait("bytes-A", 2, 33.5)))
    assert numbers.settled == []
    assert numbers.stale_seconds == {"cut off": 12.0}


def test_a_server_that_missed_an_event_is_stale_until_a_later_document() -> None:
    """s1 never shows A: when it is back, the scope is already at C."""
    seen = wait("bytes-A", 2, 21.6, server="s0")
    later = wait("bytes-C", 4, 33.5)
    numbers = measure(recording(restart("A", 21.0, 21.5), seen, later))
    assert numbers.stale_seconds == {"cut off": 12.0}


def test_the_longest_time_without_writes_is_counted_by_fault() -> None:
    numbers = measure(
        recording(
            restart("A", 1.0, 1.5),
            restart("B", 2.0, 2.5),
            call(Kind.RESTART, 22.0, 22.5, 503),
            restart("C", 34.0, 34.5),
        )
    )
    assert numbers.quiet_seconds == {"": 1.0, "cut off": 32.0}


def test_time_in_which_a_server_is_not_ready_is_added_up() -> None:
    probes = [call(Kind.READY, at, at, status) for at, status in [(1, 200), (2, 503), (3, 0)]]
    numbers = measure(recording(*probes, call(Kind.READY, 4.5, 4.5), call(Kind.READY, 5.5, 5.5)))
    assert numbers.not_ready_seconds == {"s0": 2.5, "s1": 0.0}


def test_an_event_whose_announcement_failed_during_a_fault_is_late() -> None:
    entry = HistoryEntry(
        number=1, at=21.0, what="scheduled", event="A", cause="user-restart", resources=("one",)
    )

    def late(failed: Call) -> list[str]:
        found = find_late(replace(recording(failed), entries=(entry,)), CUT)
        return [each.event for each in found]

    failed = call(Kind.RESTART, 20.9, 29.0, 503, client="s0/announcer", vm="one")
    assert late(failed) == ["A"]
    assert late(replace(failed, status=202, events=(Shown("A", "Scheduled"),))) == []
    assert late(replace(failed, status=409)) == []
    assert late(replace(failed, asked_at=19.9)) == []
    assert late(replace(failed, vm="two")) == []
    assert late(replace(failed, kind=Kind.DELETE)) == []


def test_a_report_names_the_seed_and_every_fault() -> None:
    text = render(recording(restart("A", 10.0, 10.5), wait("bytes-A", 2, 10.75)), [])
    assert "1.0 minutes, seed 7, faults: 1, broken promises: 0\n" in text
    assert "| from the response to the document on another server | p50 250.0 ms" in text
    assert "| cut off | 1 | 1.0 s | 0.0 s | 0.0 s |" in text
