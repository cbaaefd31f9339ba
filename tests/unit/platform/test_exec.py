"""How long a command of the exec platform may act on its VM after it was canceled.

The claim of its impact says so, and another server takes the impact over after that.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.engine.worker import Worker
from forewarn.option_kind import ExecCommand
from forewarn.platform.base import COMMAND_GRACE_SECONDS, ImpactRequest, SlowToStop
from forewarn.platform.exec import ExecPlatform
from tests.builders import guid
from tests.sim.jumping_loop import JumpingLoop

REBOOT = ImpactRequest(
    guid(1), "web", Vm(name="web-0"), EventType.REBOOT, Cause.RESTART, tries=1, duration_seconds=-1
)
SIGNALS: dict[int, list[tuple[int, float]]] = {}
"""The signals to each group that is looked at, with the time of the event loop."""


def note_signal(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.killpg" or arguments[0] not in SIGNALS:
        return
    group, number = arguments
    signals = SIGNALS[group]
    if signal.SIGKILL in dict(signals):  # let it exit: the event loop does not wait in real time
        os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT)
    signals.append((number, asyncio.get_running_loop().time()))


sys.addaudithook(note_signal)


def make_platform(script: str) -> ExecPlatform:
    command = ExecCommand("Reboot", ("sh", "-c", script))
    return ExecPlatform([command], seconds_max=60, environ=dict(os.environ))


def test_command_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    """It acts on the VM until then: for the grace period, and no longer."""
    os.mkfifo(tmp_path / "begun")
    script = f"trap '' TERM; echo $$ > {tmp_path}/begun; while :; do sleep 0.05; done"
    platform = make_platform(script)

    async def cancel() -> list[tuple[int, float]]:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(platform.run_impact(REBOOT))
        await asyncio.sleep(0)
        group = int((tmp_path / "begun").read_text())
        SIGNALS[group] = []
        canceled_at = loop.time()
        call.cancel()
        await asyncio.wait((call,))
        return [(number, at - canceled_at) for number, at in SIGNALS.pop(group)]

    with asyncio.Runner(loop_factory=JumpingLoop) as loop:
        signals = loop.run(cancel())
    assert signals[:2] == [(signal.SIGTERM, 0), (signal.SIGKILL, COMMAND_GRACE_SECONDS)]


def test_exec_platform_is_slow_to_stop() -> None:
    """Otherwise its impacts would be claimed as ones that stop at once."""
    platform = make_platform("true")
    assert isinstance(platform, SlowToStop)
    assert platform.stop_seconds == 9.0  # of a stopped server: 4 until that is noticed, 5 of grace


def test_server_that_stops_waits_for_longer_than_a_command_takes() -> None:
    """A command that it does not wait for acts on the VM without it."""
    assert Worker.stop_seconds_max > COMMAND_GRACE_SECONDS
