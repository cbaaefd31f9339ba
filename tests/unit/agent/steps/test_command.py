"""Commands: their exit code, their words, their limits."""

import os
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from forewarn.agent.steps.command import (
    OUTPUT_BYTES_MAX,
    RunStep,
    SystemdStep,
    run_all,
    run_command,
)
from tests.unit.agent.agent_world import no_new_threads
from tests.unit.agent.steps.build import context, context_until, reboot, script


def shell(text: str, **more: object) -> dict[str, object]:
    return {"command": text, "shell": True, **more}


def test_command_gets_the_event_in_its_environment(tmp_path: Path) -> None:
    """Never in its arguments, where a shell could read it as code."""
    text = 'echo "$EVENT_ID $EVENT_TYPE $EVENT_PHASE $EXTRA" > output'
    make_step(
        "run",
        shell(text, directory=str(tmp_path), environment={"EXTRA": "more", "EVENT_ID": "no"}),
        "W",
    ).run(context())

    assert (tmp_path / "output").read_text() == "E1 Reboot prepare more\n"


def test_list_runs_without_a_shell(tmp_path: Path) -> None:
    """A dollar or a semicolon in an argument is only a character."""
    made = script(tmp_path / "show", f'printf "%s|" "$@" > {tmp_path}/output')
    make_step("run", [made, "$HOME; ls", "two"], "W").run(context())

    assert (tmp_path / "output").read_text() == "$HOME; ls|two|"


def test_nonzero_exit_code_fails_with_the_output() -> None:
    """The operator sees the reason without searching for it."""
    with pytest.raises(StepFailed, match=r"^sh ended with exit code 3: out\nerr$") as failure:
        make_step("run", shell("echo out; echo err >&2; exit 3"), "W").run(context())

    assert failure.value.facts == {"exit_code": 3}
    assert "time" not in failure.value.message


def test_only_the_end_of_a_long_output_is_kept() -> None:
    """It must not fill the memory, and the end explains the failure."""
    with pytest.raises(StepFailed) as failure:
        make_step("run", shell("yes | head -c 3000000; echo why; exit 1"), "W").run(context())

    assert failure.value.message.endswith("y\ny\nwhy")
    assert len(failure.value.message) < OUTPUT_BYTES_MAX + 100


def test_command_killed_by_a_signal_fails() -> None:
    with pytest.raises(StepFailed, match="was killed by SIGKILL"):
        make_step("run", shell("kill -9 $$"), "W").run(context())


def test_missing_command_fails_the_step() -> None:
    with pytest.raises(StepFailed, match="cannot run /no/such: No such file or directory"):
        make_step("run", ["/no/such"], "W").run(context())


def test_command_gets_sigterm_at_its_limit(tmp_path: Path) -> None:
    """It may still clean up."""
    begun = f"echo begun | tee {tmp_path}/begun"
    text = f"trap 'echo tidied; exit' TERM; {begun}; while :; do sleep 0.05; done"
    with pytest.raises(
        StepFailed, match=r"(?s)^sh was terminated at its time limit: begun\n.*tidied$"
    ):
        make_step("run", shell(text, grace_seconds=20), "W").run(context_until(tmp_path / "begun"))


def test_command_that_ignores_sigterm_is_killed_with_children(
    tmp_path: Path,
) -> None:
    """A shell that dies and leaves its child running has not been stopped."""
    text = f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/child; wait; sleep 600"
    with pytest.raises(StepFailed, match="at its time limit"):
        make_step("run", shell(text, grace_seconds=0.2), "W").run(context_until(tmp_path / "child"))

    assert not is_running(int((tmp_path / "child").read_text()))


def test_children_of_a_terminated_command_are_killed(tmp_path: Path) -> None:
    """The whole group is terminated, not only its first process."""
    stubborn = script(
        tmp_path / "stubborn",
        "trap '' TERM",
        f"echo $$ > {tmp_path}/child",
        "while :; do sleep 0.05; done",
    )
    with pytest.raises(StepFailed, match="at its time limit"):
        make_step("run", shell(f"{stubborn} & wait", grace_seconds=0.3), "W").run(
            context_until(tmp_path / "child")
        )

    assert not is_running(int((tmp_path / "child").read_text()))


def test_id_of_a_group_stays_taken_until_the_group_is_killed(tmp_path: Path) -> None:
    """The shell ends at SIGTERM, its child does not. If the shell were reaped then, its id could be
    another group's when SIGKILL is sent, and the agent is often root.
    """
    watch = f"sed 's/.*) //' /proc/$PPID/stat > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/state"
    stubborn = script(
        tmp_path / "stubborn",
        f"trap '' TERM; echo $PPID $$ > {tmp_path}/pids",
        f"while :; do {watch}; sleep 0.05; done",
    )
    with pytest.raises(StepFailed, match="at its time limit"):
        make_step("run", shell(f"{stubborn} & wait", grace_seconds=0.5), "W").run(
            context_until(tmp_path / "state")
        )

    leader, child = map(int, (tmp_path / "pids").read_text().split())
    assert (tmp_path / "state").read_text()[:2] == "Z "
    assert not is_running(child)
    assert not Path(f"/proc/{leader}").exists()


def test_command_is_terminated_when_the_step_must_stop() -> None:
    """A shutdown does not wait for a step of five minutes."""
    soon = context(seconds=60)
    timer = threading.Timer(0.2, soon.stop.set)
    timer.start()
    with pytest.raises(StepFailed, match="was terminated: stopped early") as failure:
        make_step("run", ["sleep", "60"], "W").run(soon)
    timer.join()

    assert "time" not in failure.value.message


def test_background_processes_are_not_awaited(tmp_path: Path) -> None:
    """Recovery starts daemons with such commands, and they keep the pipe open."""
    make_step("run", shell(f"sleep 600 & echo $! > {tmp_path}/child"), "W").run(context())
    child = int((tmp_path / "child").read_text())

    assert is_running(child)
    os.kill(child, 9)


def test_command_without_a_thread_for_its_output_is_terminated() -> None:
    """It would run on without a limit."""
    before = children()
    with (
        no_new_threads(),
        pytest.raises(StepFailed, match=r"^sleep was terminated: can't start new thread$"),
    ):
        make_step("run", ["sleep", "60"], "W").run(context())

    assert children() <= before


def test_command_is_not_started_without_time() -> None:
    """Starting a failover only to kill it is worse than not starting it."""
    with pytest.raises(StepFailed, match="sleep was not run: no time left"):
        run_command(RunStep(("sleep", "60")), context(seconds=0))


def test_commands_share_the_time_and_a_failure_stops_none(
    tmp_path: Path,
) -> None:
    """A command that hangs must not cost the others their turn."""
    commands = [
        RunStep(("/bin/sh", "-c", f"echo begun > {tmp_path}/begun; sleep 600")),
        RunStep(("false",)),
        RunStep(("touch", str(tmp_path / "done"))),
    ]
    with pytest.raises(
        StepFailed, match=r"^sh was terminated at its time limit; false ended with exit code 1$"
    ):
        run_all(commands, context_until(tmp_path / "begun", seconds=3, jump_seconds=2))

    assert (tmp_path / "done").exists()


def test_no_command_is_started_when_the_step_must_stop(tmp_path: Path) -> None:
    soon = context()
    timer = threading.Timer(0.2, soon.stop.set)
    timer.start()
    commands = [RunStep(("sleep", "60")), RunStep(("touch", str(tmp_path / "done")))]
    with pytest.raises(
        StepFailed,
        match=r"^sleep was terminated: stopped early; touch was not run: stopped early$",
    ):
        run_all(commands, soon)
    timer.join()

    assert not (tmp_path / "done").exists()


def test_children_of_a_dead_shell_still_get_the_grace(tmp_path: Path) -> None:
    """The shell does not clean up; the database that it started does."""
    tidy = f"trap 'sleep 0.4; echo tidied > {tmp_path}/tidied; exit' TERM"
    child = script(
        tmp_path / "tidy", tidy, f"echo $$ > {tmp_path}/child", "while :; do sleep 0.05; done"
    )
    with pytest.raises(StepFailed, match="at its time limit"):
        make_step("run", shell(f"{child} & wait", grace_seconds=20), "W").run(
            context_until(tmp_path / "child")
        )

    assert (tmp_path / "tidied").read_text() == "tidied\n"


def test_command_that_ignores_sigterm_ends_at_the_limit() -> None:
    """Not a grace period later: that time is for the approval."""
    begun = time.monotonic()
    with pytest.raises(StepFailed, match="at its time limit"):
        make_step(
            "run", shell("trap '' TERM; while :; do sleep 0.05; done", grace_seconds=20), "W"
        ).run(context(seconds=0.4))

    assert time.monotonic() - begun < 3


def test_long_description_does_not_prevent_a_command() -> None:
    """Linux rejects a variable of 128 KiB, and with it every command of the rule."""
    make_step("run", ["true"], "W").run(context(event=reboot(description="x" * 140_000)))


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the beginning of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def systemctl(folder: Path, *lines: str) -> None:
    script(folder / "systemctl", f'echo "$@" >> {folder}/calls', *lines)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("phase", "action", "expected"),
    [
        ("prepare", "by-phase", ["stop -- a", "stop -- b"]),
        ("start", "by-phase", ["stop -- a", "stop -- b"]),
        ("recover", "by-phase", ["start -- b", "start -- a"]),
        ("prepare", "start", ["start -- b", "start -- a"]),
        ("recover", "stop", ["stop -- a", "stop -- b"]),
        ("recover", "restart", ["restart -- b", "restart -- a"]),
    ],
)
def test_units_stop_in_order_and_start_in_reverse(
    commands: Path, phase: str, action: Literal["stop"], expected: list[str]
) -> None:
    """The same step may be in both phases; `action` overrides."""
    systemctl(commands)
    SystemdStep(("a", "b"), action).run(context(phase))

    assert calls(commands) == expected


def test_unit_that_does_not_stop_leaves_time_for_others(commands: Path) -> None:
    """The machine goes down anyway: better one unit killed than all."""
    systemctl(commands, '[ "$3" = slow ] && sleep 600', "exit 0")
    with pytest.raises(StepFailed, match="systemctl was terminated at its time limit"):
        SystemdStep(("slow", "b")).run(
            context_until(commands / "calls", seconds=4, jump_seconds=2.5)
        )

    assert calls(commands) == ["stop -- slow", "stop -- b"]


def test_output_of_systemctl_is_in_the_error(commands: Path) -> None:
    systemctl(commands, "echo Unit x not loaded.; exit 5")
    with pytest.raises(StepFailed, match=r"systemctl ended with exit code 5: Unit x not loaded\."):
        SystemdStep(("x",)).run(context())


def test_missing_systemctl_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StepFailed, match="cannot run systemctl: No such file"):
        SystemdStep(("x",)).run(context())


def hook(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    script(path, f'echo "$(basename $0) $EVENT_ID $EVENT_PHASE" >> {folder}/output', *lines)
    return path


def test_hooks_of_a_phase_run_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("prepare.d/20-b", "prepare.d/10-a", "recover.d/10-c"):
        hook(tmp_path, name)
    made = make_step("hooks", str(tmp_path), "W")
    made.run(context("prepare"))
    made.run(context("start"))
    made.run(context("recover"))

    assert (tmp_path / "output").read_text().splitlines() == [
        "10-a E1 prepare",
        "20-b E1 prepare",
        "10-c E1 recover",
    ]


def test_leftovers_in_a_hook_directory_do_not_run(tmp_path: Path) -> None:
    """Nor files without the x bit, nor directories."""
    for name in (
        "prepare.d/a~",
        "prepare.d/a.dpkg-old",
        "prepare.d/.a",
        "prepare.d/a.sh",
        "prepare.d/off",
    ):
        hook(tmp_path, name)
    (tmp_path / "prepare.d" / "off").chmod(0o644)
    (tmp_path / "prepare.d" / "folder").mkdir()
    make_step("hooks", str(tmp_path), "W").run(context())

    assert not (tmp_path / "output").exists()


def test_failing_or_hanging_hook_does_not_block_others(tmp_path: Path) -> None:
    """They come from different packages."""
    hook(tmp_path, "prepare.d/1", "sleep 600")
    hook(tmp_path, "prepare.d/2", "echo no; exit 4")
    hook(tmp_path, "prepare.d/3")
    with pytest.raises(
        StepFailed, match="1 was terminated at its time limit; 2 ended with exit code 4: no"
    ):
        make_step("hooks", str(tmp_path), "W").run(
            context_until(tmp_path / "output", seconds=6, jump_seconds=3)
        )

    assert (tmp_path / "output").read_text().splitlines()[-1] == "3 E1 prepare"


def test_missing_hook_directory_fails_the_step(tmp_path: Path) -> None:
    """It was configured, so hooks are expected to run."""
    with pytest.raises(StepFailed, match="does not exist"):
        make_step("hooks", str(tmp_path / "hoks.d"), "W").run(context())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def children() -> set[str]:
    """The processes that this thread started and that were not awaited yet."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())
