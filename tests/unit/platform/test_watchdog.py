"""Commands end with the process that has started them, whatever happens to it."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Vm
from forewarn.errors import Unavailable
from forewarn.hostd.daemon import mark_as_running
from forewarn.hostd.settings import HostdConfig
from forewarn.option_kind import ExecCommand
from forewarn.platform.base import ImpactRequest, ImpactResult, run_platform_call
from forewarn.platform.exec import ExecPlatform
from forewarn.platform.watchdog import SCRIPT, Watchdog
from tests.builders import guid
from tests.e2e.waiting import eventually
from tests.unit.platform.instant_clock import InstantClock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

GRACE_SECONDS = SILENT_SECONDS = 0.5
PARENT = """
import asyncio, sys
from forewarn.platform.exec import Output, run_command
from forewarn.platform.watchdog import Watchdog

async def main():
    with_output = Output(), Output()
    watchdog = Watchdog({grace}, {silent})
    asyncio.get_running_loop().call_soon(open, "watched", "w")
    await run_command(("sh", "-c", sys.argv[1]), {{}}, with_output, (600, {grace}), watchdog)

asyncio.run(main())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """A process that runs a command under a watchdog. The command has begun."""
    parents = list[subprocess.Popen[bytes]]()

    def start(command: str, silent_seconds: float = 600.0) -> subprocess.Popen[bytes]:
        program = textwrap.dedent(PARENT).format(grace=GRACE_SECONDS, silent=silent_seconds)
        parent = subprocess.Popen([sys.executable, "-c", program, command], cwd=tmp_path)
        parents.append(parent)
        eventually((tmp_path / "begun").exists)
        eventually((tmp_path / "watched").exists)
        return parent

    yield start
    for parent in parents:
        parent.kill()
        parent.wait()


CAREFUL = "trap 'echo > ended; exit' TERM; echo > begun; sleep 600 & wait"
"""As docs/platforms.md says. Nobody reads the output of a command whose server is killed, and dash
would write there that a program in the foreground was terminated.
"""
STUBBORN = "trap '' TERM; echo > begun; while :; do echo >> alive; sleep 0.05; done"


def test_command_of_a_killed_process_gets_sigterm(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Another server, or the next run of this one, is about to try again."""
    parent = start(CAREFUL)
    assert not (tmp_path / "ended").exists()
    parent.kill()
    eventually((tmp_path / "ended").exists)


def test_command_that_ignores_sigterm_is_killed_after_the_grace_period(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    start(STUBBORN).kill()
    eventually(lambda: has_stopped_growing(tmp_path / "alive"))


def has_stopped_growing(file: Path) -> bool:
    before = file.stat().st_size
    subprocess.run(["sleep", "0.3"], check=True)
    return file.stat().st_size == before


def test_command_of_a_process_that_was_stopped_is_ended(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Its lease ends, too, and it cannot end the command itself."""
    parent = start(CAREFUL, SILENT_SECONDS)
    parent.send_signal(signal.SIGSTOP)
    eventually((tmp_path / "ended").exists)
    parent.send_signal(signal.SIGCONT)
    assert parent.wait(30) == 0


def test_command_that_began_between_two_stops_is_ended_as_soon_as_the_first_one(
    tmp_path: Path,
) -> None:
    """The first one does not end at SIGTERM, and its grace period is not over."""
    slow = "trap 'echo > signaled' TERM; echo > begun; while :; do sleep 0.05; done"
    watching = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(SILENT_SECONDS), "600"], stdin=subprocess.PIPE
    )
    assert watching.stdin is not None
    commands = list[subprocess.Popen[bytes]]()
    try:
        for name, command, end in (("first", slow, "signaled"), ("second", CAREFUL, "ended")):
            folder = tmp_path / name
            folder.mkdir()
            commands.append(
                subprocess.Popen(["sh", "-c", command], cwd=folder, start_new_session=True)
            )
            eventually((folder / "begun").exists)
            os.write(watching.stdin.fileno(), b"+%d\n" % commands[-1].pid)
            eventually((folder / end).exists)
        assert commands[0].poll() is None
    finally:
        watching.kill()
        watching.communicate()
        for each in commands:
            each.kill()
            each.wait()


def test_command_of_a_process_that_lives_runs_on(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Beats come each second."""
    parent = start("echo > begun; sleep 4; echo > ended", 3.0)
    assert parent.wait(60) == 0
    assert (tmp_path / "ended").exists()


def test_daemon_that_was_killed_starts_again_when_its_commands_have_ended(tmp_path: Path) -> None:
    """Its next run would be handed the same impacts."""
    config = HostdConfig(host=str(tmp_path), server=("http://127.0.0.1:9",))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            mark_as_running(config, stack)
            watchdog = Watchdog()
            watchdog._require_process()
        async with AsyncExitStack() as stack:
            with pytest.raises(Unavailable, match="another process on this machine is the daemon"):
                mark_as_running(config, stack)
            del watchdog  # it has no command to end
            gc.collect()
            mark_as_running(config, stack)

    asyncio.run(main())


def test_watchdog_that_was_killed_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        watchdog = Watchdog(GRACE_SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        group = watchdog.start(("/bin/sleep", "600"), {}, stdout=null, stderr=null)
        with watchdog.watching(group):
            first = watchdog._process
            assert first is not None
            first.kill()
            first.wait()
            while (second := watchdog._process) is first:
                await asyncio.sleep(0.05)  # a beat comes each second
            assert second is not None
            assert second.stdin is not None
            second.stdin.close()  # as if this process were gone
            await asyncio.wait_for(group.wait(), 30)
            second.wait()
        assert group.close() == -signal.SIGTERM

    asyncio.run(main())


def test_command_that_is_not_watched_does_not_begin(tmp_path: Path) -> None:
    """This process may be killed between the two, and the watchdog would not know of it."""

    async def main() -> None:
        watchdog = Watchdog(GRACE_SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        command = ("/bin/sh", "-c", f"echo > {tmp_path}/begun")
        group = watchdog.start(command, {}, stdout=null, stderr=null)
        os.close(watchdog._gates.pop(group))  # as when this process is killed
        await asyncio.wait_for(group.wait(), 30)
        group.close()

    asyncio.run(main())
    assert not (tmp_path / "begun").exists()


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """This process can open no file and start no program."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def end_process_of(watchdog: Watchdog) -> None:
    assert watchdog._process is not None
    watchdog._process.kill()
    watchdog._process.wait()


REBOOT = ImpactRequest(
    guid(1), "web", Vm(name="web-0"), EventType.REBOOT, Cause.RESTART, tries=1, duration_seconds=-1
)


def run_during_shortage(
    tmp_path: Path, script: str, end: Callable[["asyncio.Task[ImpactResult]"], object]
) -> "asyncio.Task[ImpactResult]":
    """Call the exec platform. No descriptor is left when the command has begun, nor a watchdog.

    `end` is what happens then. The shortage is over when the call has ended, or would be repeated.
    """
    command = ExecCommand(
        "Reboot", ("/bin/sh", "-c", f"cd {tmp_path}; echo try >> tries; {script}")
    )
    platform = ExecPlatform([command], seconds_max=10, environ=os.environ, grace_seconds=0.5)

    async def main() -> "asyncio.Task[ImpactResult]":
        await asyncio.to_thread(int)  # the first thread imports a module; a server has had some
        over = asyncio.Event()
        call = asyncio.create_task(
            run_platform_call(
                lambda: platform.run_impact(REBOOT),
                InstantClock(),
                timedelta(hours=1),
                lambda problem: over.set(),
            )
        )
        call.add_done_callback(lambda call: over.set())
        while not (tmp_path / "tries").exists():
            await asyncio.sleep(0.01)
        end_process_of(platform._watchdog)
        with no_file_descriptors():
            end(call)
            await over.wait()
        await asyncio.wait((call,))
        return call

    return asyncio.run(main())


UNTIL_ENDED = "while [ ! -d go ]; do sleep 0.05; done"


def test_command_that_succeeded_during_a_shortage_does_not_run_again(tmp_path: Path) -> None:
    """It has rebooted the VM. A shortage means that nothing was done only before it begins."""
    call = run_during_shortage(tmp_path, UNTIL_ENDED, lambda call: (tmp_path / "go").mkdir())
    assert call.result().problem == ""
    assert (tmp_path / "tries").read_text() == "try\n"


def test_command_that_is_canceled_during_a_shortage_does_not_run_again(tmp_path: Path) -> None:
    """The server stops, or the event is over."""
    script = f"(trap '' TERM; {UNTIL_ENDED}) & wait"
    call = run_during_shortage(tmp_path, script, lambda call: call.cancel())
    assert call.cancelled()
    assert (tmp_path / "tries").read_text() == "try\n"


def test_watchdog_that_could_not_be_started_again_is_tried_at_the_next_beat() -> None:
    """Without beats, the next one would end the commands of a server that lives."""
    null = subprocess.DEVNULL

    async def main() -> None:
        watchdog = Watchdog(GRACE_SECONDS)
        group = watchdog.start(("/bin/sleep", "600"), {}, stdout=null, stderr=null)
        with watchdog.watching(group):
            end_process_of(watchdog)
            first, beat = watchdog._process, watchdog._beat
            async with asyncio.timeout(10):
                with no_file_descriptors():
                    while watchdog._beat is beat:
                        await asyncio.sleep(0.05)  # a beat comes each second
                assert watchdog._process is first
                while watchdog._process is first:
                    await asyncio.sleep(0.05)
            await group.end(GRACE_SECONDS)
        group.close()

    asyncio.run(main())
