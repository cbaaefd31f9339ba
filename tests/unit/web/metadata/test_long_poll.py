"""Polls that wait for a change."""

import asyncio
from dataclasses import replace

from forewarn.core.command import Retire
from forewarn.core.fleet import Vm
from tests.unit.web.guest import BY_ADDRESS, EVENTS, TRUE, WEB_0, WEB_1, Guest, run, settle
from tests.unit.web.instant_loop import EagerLoop

WAITING = (TRUE, (b"if-none-match", b'"1"'), (b"prefer", b"wait=30"))


def test_long_poll_returns_when_the_document_changes() -> None:
    async def main(guest: Guest) -> None:
        await guest.call(EVENTS, TRUE)
        waiting = asyncio.create_task(guest.call(EVENTS, *WAITING))
        await settle()
        assert not waiting.done()
        await guest.restart()
        response = await waiting
        assert (response.status, response.json["DocumentIncarnation"]) == (200, 2)
        assert (response.headers["etag"], response.headers["preference-applied"]) == (
            '"2"',
            "wait=30",
        )
        assert guest.place.waiters is None

    run(main)


def test_long_poll_with_an_old_etag_returns_at_once() -> None:
    async def main(guest: Guest) -> None:
        response = await guest.call(
            EVENTS, TRUE, (b"if-none-match", b'"9"'), (b"prefer", b"wait=30")
        )
        assert response.status == 200
        assert "preference-applied" not in response.headers
        assert (await guest.call(EVENTS, TRUE, (b"prefer", b"wait=30"))).status == 200

    run(main)


def test_disconnect_ends_a_long_poll() -> None:
    async def main(guest: Guest) -> None:
        waiting = asyncio.create_task(guest.call(EVENTS, *WAITING))
        await settle()
        assert len(guest.place.waiters or ()) == 1
        guest.is_gone.set()
        assert (await waiting).is_nothing
        assert guest.place.waiters is None

    run(main)


def test_stop_ends_long_polls_and_accepts_no_more() -> None:
    async def main(guest: Guest) -> None:
        waits = [asyncio.create_task(guest.call(EVENTS, *WAITING)) for _ in range(50)]
        await settle()
        guest.application.stop()
        assert {response.status for response in await asyncio.gather(*waits)} == {304}
        assert (await guest.call(EVENTS, *WAITING)).status == 304

    run(main)


def test_vm_removed_during_a_long_poll_is_forbidden() -> None:
    async def main(guest: Guest) -> None:
        waiting = asyncio.create_task(guest.call(EVENTS, *WAITING))
        await settle()
        await guest.engine.submit("web", Retire(), by="test")
        assert (await waiting).status == 403

    run(main)


def test_vm_moved_during_a_long_poll_gets_its_new_document() -> None:
    async def main(guest: Guest) -> None:
        await guest.enrol("other", Vm(name="other-0", address="10.0.2.1"))
        await guest.call(EVENTS, TRUE, address="10.0.2.1")
        await guest.restart("other-0", "other")
        waiting = asyncio.create_task(guest.call(EVENTS, *WAITING))
        await settle()
        await guest.enrol("other", Vm(name="other-0", address="10.0.2.1"), WEB_0)
        await guest.enrol("web", WEB_1)
        response = await waiting
        assert (response.status, response.json["Events"][0]["Resources"]) == (200, ["other-0"])

    run(main)


def test_only_the_enabling_poll_is_delayed() -> None:
    """As on Azure, where the first answer takes up to two minutes; from then on clients count on
    quick ones.
    """

    async def main(guest: Guest) -> None:
        loop, took = asyncio.get_running_loop(), []
        for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
            began = loop.time()
            assert (await guest.call(EVENTS, TRUE, address=address)).status == 200
            took.append(round(loop.time() - began))
        assert took == [120, 0, 0]

    run(main, replace(BY_ADDRESS, first_call_delay_seconds=120), EagerLoop)
