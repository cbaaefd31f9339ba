"""VMs that boot after an impact: let the platform notice when they are back.

Polls are noticed by every server, and the limit is a deadline of the scope.
"""

import asyncio
from datetime import timedelta

from forewarn.core.command import Back
from forewarn.core.event import ImpactState
from forewarn.engine.board import PublishedScope
from forewarn.engine.clock import within
from forewarn.engine.engine import Engine
from forewarn.errors import NotFound, Unavailable
from forewarn.platform.base import BackWatcher, ImpactRequest, Platform, make_request

RETRY = timedelta(seconds=1)


class BootWatch:
    """Has a task for each VM that the platform waits for. It ends with the impact of the VM."""

    def __init__(self, engine: Engine, platform: Platform) -> None:
        self._engine = engine
        self._platform = platform if isinstance(platform, BackWatcher) else None
        self._tasks: dict[str, dict[asyncio.Task[None], str]] = {}  # with their VM, by scope
        engine.board.subscribe(self._on_scope_changed)

    def start(self, scope: str, event_id: str, vm: str, by: str) -> None:
        """Wait for this VM if its impact does, and if the platform can."""
        published = self._engine.board.scopes.get(scope)
        if self._platform is None or published is None:
            return
        impact = published.scope.impact(event_id, vm)
        if impact is None or impact.state is not ImpactState.BOOTING:
            return
        request = make_request(published.scope, impact)
        if request is None:
            return
        task = asyncio.create_task(self._watch(self._platform, request, by))
        tasks = self._tasks.setdefault(scope, {})
        tasks[task] = vm
        task.add_done_callback(tasks.pop)

    def _on_scope_changed(self, published: PublishedScope) -> None:
        name, booting = published.scope.name, published.booting or ()
        for task, vm in self._tasks.get(name, {}).items():
            if vm not in booting:
                task.cancel()
        if not booting:
            self._tasks.pop(name, None)

    async def _watch(self, platform: BackWatcher, request: ImpactRequest, by: str) -> None:
        clock, vm = self._engine.clock, request.vm.name
        back = Back(event_id=request.event_id, vm=vm, detail="guest agent answers")
        try:
            limit = self._engine.timing.back_limit
            await within(clock, limit, platform.wait_until_back(request))
        except TimeoutError:
            return
        except Exception as error:  # whatever a platform raises, a poll or the limit ends the wait
            problem = str(error) or type(error).__name__
            self._engine.throttled_log.warn("guest agent not asked", vm=vm, problem=problem)
            return
        while True:  # ends when it is recorded, or when the impact is over
            try:
                await self._engine.submit(request.scope, back, by=by)
                return
            except NotFound:
                return
            except Unavailable:
                await clock.sleep_until(clock.now() + RETRY)

    async def stop(self) -> None:
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
