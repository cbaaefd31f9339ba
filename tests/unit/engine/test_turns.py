"""Turns: however many long requests there are, one slice is rendered at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

from forewarn.engine.turns import CLIENTS_MIN, SECONDS_AT_ONCE, SHARE, Turns
from tests.unit.web.instant_loop import EagerLoop

SLICE_SECONDS = 0.01


class WorkingLoop(EagerLoop):
    """Time passes by waiting, and by work."""

    worked_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.worked_seconds


async def render(loop: WorkingLoop, turn: Callable[[], Awaitable[None]], slices: int) -> float:
    """Render so many slices; how long it took."""
    began = loop.time()
    for _ in range(slices):
        await turn()
        loop.worked_seconds += SLICE_SECONDS
    return loop.time() - began


def run_working(act: Callable[[WorkingLoop, Turns], Awaitable[None]]) -> None:
    loop = WorkingLoop()
    try:
        turns = Turns(loop.time)
        loop.run_until_complete(asyncio.wait_for(act(loop, turns), 1000))
    finally:
        loop.close()


def test_one_slice_is_rendered_in_an_iteration_of_the_event_loop() -> None:
    """Fifteen lists of one viewer delay a poll no longer than one list does."""

    async def run() -> None:
        turns, iteration = Turns(), 0
        slices: list[int] = []

        async def render(client: str) -> None:
            for _ in range(10):
                await turns.take(client)
                slices.append(iteration)

        rendering = [asyncio.create_task(render(f"token {number % 3}")) for number in range(15)]
        while not all(task.done() for task in rendering):
            await asyncio.sleep(0)
            iteration += 1

        assert len(slices) == 150
        assert all(one < other for one, other in pairwise(slices))

    asyncio.run(run())


def test_many_requests_of_one_client_do_not_delay_those_of_another() -> None:
    """Clients take turns, not requests: an operator's list passes a viewer's ten streams."""

    async def run() -> None:
        turns = Turns()
        order: list[str] = []

        async def render(client: str) -> None:
            for _ in range(5):
                await turns.take(client)
                order.append(client)

        async with asyncio.TaskGroup() as group:
            for client in [*["viewer"] * 10, "operator"]:
                group.create_task(render(client))

        assert order.index("operator") <= 2
        assert order[:12].count("operator") == 5

    asyncio.run(run())


def test_a_usual_list_is_rendered_without_a_pause() -> None:
    """The allowance is for lists without an end: a list of 10,000 VMs takes a fifth of it."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        slices = int(SECONDS_AT_ONCE / SLICE_SECONDS)
        took = await render(loop, lambda: turns.take("viewer"), slices)
        assert round(took, 3) == SECONDS_AT_ONCE

    run_working(act)


def test_one_client_gets_its_share_of_the_event_loop_and_no_more() -> None:
    """Fifteen requests of a viewer leave the server idle for the rest of the time, so that the
    kernel lets it answer a poll at once.
    """

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        await render(loop, lambda: turns.take("viewer"), int(SECONDS_AT_ONCE / SLICE_SECONDS))
        began, slices = loop.time(), 0

        async def read() -> None:
            nonlocal slices
            while loop.time() < began + 60:
                await render(loop, lambda: turns.take("viewer"), 1)
                slices += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(15):
                group.create_task(read())

        worked = slices * SLICE_SECONDS
        allowed = SHARE * 60 + SHARE * SECONDS_AT_ONCE / SHARE
        assert 0.9 * SHARE * 60 <= worked <= allowed + 0.2

    run_working(act)


def test_a_long_list_ends_in_a_bounded_multiple_of_its_time() -> None:
    """A limit that could starve a list would be worse than the delay that it prevents."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        slices = 1000
        took = await render(loop, lambda: turns.take("viewer"), slices)
        assert took <= slices * SLICE_SECONDS / SHARE + 0.1

    run_working(act)


def test_a_client_without_allowance_does_not_slow_another_down() -> None:
    """Each token has its own: an operator's list passes while a viewer waits."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        await render(loop, lambda: turns.take("viewer"), int(3 * SECONDS_AT_ONCE / SLICE_SECONDS))
        waiting = asyncio.ensure_future(render(loop, lambda: turns.take("viewer"), 100))
        took = await render(loop, lambda: turns.take("operator"), 20)
        assert took <= (20 + 20) * SLICE_SECONDS
        assert not waiting.done()
        await waiting

    run_working(act)


def test_an_allowance_is_whole_again_after_a_while() -> None:
    """The list that a script reads every minute is never delayed."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        slices = int(SECONDS_AT_ONCE / SLICE_SECONDS)
        await render(loop, lambda: turns.take("script"), slices)
        await asyncio.sleep(SECONDS_AT_ONCE / SHARE)
        assert round(await render(loop, lambda: turns.take("script"), slices), 3) == SECONDS_AT_ONCE

    run_working(act)


def test_the_beginning_of_a_request_uses_no_allowance() -> None:
    """Commands of operators are not limited, however many lists were read before."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        await render(loop, lambda: turns.take("operator"), int(SECONDS_AT_ONCE / SLICE_SECONDS))
        took = await render(loop, lambda: turns.start("operator"), 100)
        assert round(took, 3) == 100 * SLICE_SECONDS

    run_working(act)


def test_clients_that_have_all_of_their_allowance_are_forgotten() -> None:
    """Tokens come and go for years."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        for number in range(3 * CLIENTS_MIN):
            await turns.take(f"token {number}")
            loop.worked_seconds += SLICE_SECONDS
            await asyncio.sleep(SLICE_SECONDS / SHARE)
        assert len(turns.limited) <= CLIENTS_MIN

    run_working(act)


def test_a_server_that_was_suspended_in_a_slice_serves_its_clients_soon() -> None:
    """The process was stopped for ten minutes, and that is not the work of this client."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        await turns.take("viewer")
        loop.worked_seconds += 600
        await asyncio.sleep(0)
        took = await render(loop, lambda: turns.take("viewer"), 1)
        assert took <= SECONDS_AT_ONCE / SHARE

    run_working(act)


def test_a_request_begins_while_lists_of_its_client_wait() -> None:
    """An operator's command is not delayed by the lists that the same token reads."""

    async def act(loop: WorkingLoop, turns: Turns) -> None:
        await render(loop, lambda: turns.take("operator"), int(3 * SECONDS_AT_ONCE / SLICE_SECONDS))
        lists = [
            asyncio.ensure_future(render(loop, lambda: turns.take("operator"), 10))
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        began = loop.time()
        await turns.start("operator")
        assert loop.time() - began <= SLICE_SECONDS
        await asyncio.gather(*lists)

    run_working(act)
