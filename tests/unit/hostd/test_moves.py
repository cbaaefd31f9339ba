"""The VMs that are moving to another host now."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from forewarn.hostd.moves import Moves

VM, OTHER = "vm-1", "vm-2"


@contextmanager
def wait(moves: Moves) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(moves.wait_for(VM))
    try:
        yield task
    finally:
        task.cancel()


async def let_others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_wait_ends_when_the_move_of_that_vm_begins() -> None:
    async def scenario() -> list[bool]:
        moves, ended = Moves(), list[bool]()
        with wait(moves) as task:
            for vm in (OTHER, VM):
                await let_others_run()
                with moves.moving(vm):
                    await let_others_run()
                    ended.append(task.done())
        return ended

    assert asyncio.run(scenario()) == [False, True]


def test_wait_that_begins_within_the_move_ends_at_once() -> None:
    """A long poll was sent just before the move: it would wait until the guest has left."""

    async def scenario() -> bool:
        moves = Moves()
        with wait(moves) as task, moves.moving(VM):
            await let_others_run()
            return task.done()

    assert asyncio.run(scenario())


def test_wait_after_a_move_is_for_the_next_one() -> None:
    async def scenario() -> bool:
        moves = Moves()
        with moves.moving(VM):
            pass
        with wait(moves) as task:
            await let_others_run()
            return task.done()

    assert not asyncio.run(scenario())
