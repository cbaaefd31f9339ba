"""Commands: their exit code, their words, their limits."""

import os
import threading
import time
from pathlib import Path

import pytest

from forewarn.agent.step import StepFailed, StepTimedOut
from forewarn.agent.steps import make
from forewarn.agent.steps.process import OUTPUT_BYTES_MAX, Command, run, run_each
from tests.unit.agent.steps.build import occasion, occasion_until, reboot, script


def shell(text: str, **more: object) -> dict[str, object]:
    return {"command": text, "shell": True, **more}


def test_a_command_finds_the_event_in_its_environment(tmp_path: Path) -> None:
    """And what the settings add, and where they put it; never in its words, where a shell could
    read it as code.
    """
    text = 'echo "$EVENT_ID $EVENT_TYPE $EVENT_PHASE $EXTRA" > said'
    make(
        "run",
        shell(text, directory=str(tmp_path), environment={"EXTRA": "more", "EVENT_ID": "no"}),
        "W",
    ).run(occasion())

    assert (tmp_path / "said").read_text() == "E1 Reboot prepare more\n"


def test_a_list_is_run_without_a_shell(tmp_path: Path) -> None:
    """A dollar or a semicolon in an argument is only a character."""
    made = script(tmp_path / "show", f'printf "%s|" "$@" > {tmp_path}/said')
    make("run", [made, "$HOME; ls", "two"], "W").run(occasion())

    assert (tmp_path / "said").read_text() == "$HOME; ls|two|"


def test_an_exit_code_other_than_0_is_a_failure_told_with_the_last_words() -> None:
    """The operator sees the reason without searching for it."""
    with pytest.raises(StepFailed, match=r"^sh ended with exit code 3: out\nerr$") as failure:
        make("run", shell("echo out; echo err >&2; exit 3"), "W").run(occasion())

    assert failure.value.facts == {"exit_code": 3}
    assert not isinstance(failure.value, StepTimedOut)


def test_only_the_end_of_a_long_output_is_kept() -> None:
    """A command that talks for ever must not fill our memory, and its last words tell why it
    failed.
    """
    with pytest.raises(StepFailed) as failure:
        make("run", shell("yes | head -c 3000000; echo why; exit 1"), "W").run(occasion())

    assert failure.value.message.endswith("y\ny\nwhy")
    assert len(failure.value.message) < OUTPUT_BYTES_MAX + 100


def test_a_command_that_a_signal_ended_has_failed() -> None:
    """It cannot have done its work."""
    with pytest.raises(StepFailed, match="was ended by SIGKILL"):
        make("run", shell("kill -9 $$"), "W").run(occasion())


def test_a_command_that_is_not_there_is_a_failure_of_the_step() -> None:
    """And not a crash of the agent."""
    with pytest.raises(StepFailed, match="/no/such cannot be run: No such file or directory"):
        make("run", ["/no/such"], "W").run(occasion())


def test_a_command_is_ended_at_its_limit_with_term(tmp_path: Path) -> None:
    """It may still tidy up."""
    text = f"trap 'echo tidied; exit' TERM; echo begun | tee {tmp_path}/begun; while :; do sleep 0.05; done"
    with pytest.raises(StepTimedOut, match=r"(?s)^sh was ended at its limit: begun\n.*tidied$"):
        make("run", shell(text, grace_seconds=20), "W").run(occasion_until(tmp_path / "begun"))


def test_what_does_not_hear_term_is_killed_after_the_grace_with_all_its_children(
    tmp_path: Path,
) -> None:
    """A shell that dies and leaves its child at work has not been ended."""
    text = f"trap '' TERM; sleep 600 & echo $! > {tmp_path}/child; wait; sleep 600"
    with pytest.raises(StepTimedOut):
        make("run", shell(text, grace_seconds=0.2), "W").run(occasion_until(tmp_path / "child"))

    assert not is_running(int((tmp_path / "child").read_text()))


def test_the_children_of_a_command_that_heard_term_are_ended_too(tmp_path: Path) -> None:
    """The group is what is ended, not its first process."""
    stubborn = script(
        tmp_path / "stubborn",
        "trap '' TERM",
        f"echo $$ > {tmp_path}/child",
        "while :; do sleep 0.05; done",
    )
    with pytest.raises(StepTimedOut):
        make("run", shell(f"{stubborn} & wait", grace_seconds=0.3), "W").run(
            occasion_until(tmp_path / "child")
        )

    assert not is_running(int((tmp_path / "child").read_text()))


def test_a_command_is_ended_when_the_agent_has_to_end() -> None:
    """A machine that shuts down does not wait for a step of five minutes."""
    soon = occasion(seconds=60)
    timer = threading.Timer(0.2, soon.stop.set)
    timer.start()
    with pytest.raises(StepFailed, match="was ended because the agent has to end") as failure:
        make("run", ["sleep", "60"], "W").run(soon)
    timer.join()

    assert not isinstance(failure.value, StepTimedOut)


def test_what_a_command_leaves_in_the_background_is_not_waited_for(tmp_path: Path) -> None:
    """Recovery starts daemons by such commands, and they hold our pipe open."""
    make("run", shell(f"sleep 600 & echo $! > {tmp_path}/child"), "W").run(occasion())
    child = int((tmp_path / "child").read_text())

    assert is_running(child)
    os.kill(child, 9)


def test_no_command_is_begun_without_time() -> None:
    """To begin a failover only to shoot it is worse than not to."""
    with pytest.raises(StepTimedOut, match="sleep was not run: no time was left"):
        run(Command(("sleep", "60")), occasion(seconds=0))


def test_of_several_commands_each_has_an_even_share_and_the_rest_is_run_where_one_fails(
    tmp_path: Path,
) -> None:
    """One that hangs must not cost the others their turn."""
    commands = [
        Command(("sleep", "600")),
        Command(("false",)),
        Command(("touch", str(tmp_path / "done"))),
    ]
    with pytest.raises(
        StepFailed, match=r"^sleep was ended at its limit; false ended with exit code 1$"
    ) as failure:
        run_each(commands, occasion(seconds=3))

    assert (tmp_path / "done").exists()
    assert not isinstance(failure.value, StepTimedOut)


def test_no_further_command_is_begun_when_the_agent_has_to_end(tmp_path: Path) -> None:
    """And what was not begun is not taken for done."""
    soon = occasion()
    timer = threading.Timer(0.2, soon.stop.set)
    timer.start()
    commands = [Command(("sleep", "60")), Command(("touch", str(tmp_path / "done")))]
    with pytest.raises(
        StepFailed,
        match=r"^sleep was ended because the agent has to end; touch was not run: the agent has to end$",
    ):
        run_each(commands, soon)
    timer.join()

    assert not (tmp_path / "done").exists()


def test_the_children_of_a_shell_that_died_at_once_still_have_their_grace(tmp_path: Path) -> None:
    """The shell does not tidy up; the database that it started does."""
    tidy = f"trap 'sleep 0.4; echo tidied > {tmp_path}/tidied; exit' TERM"
    child = script(
        tmp_path / "tidy", tidy, f"echo $$ > {tmp_path}/child", "while :; do sleep 0.05; done"
    )
    with pytest.raises(StepTimedOut):
        make("run", shell(f"{child} & wait", grace_seconds=20), "W").run(
            occasion_until(tmp_path / "child")
        )

    assert (tmp_path / "tidied").read_text() == "tidied\n"


def test_what_does_not_hear_term_is_over_at_the_limit_and_not_a_grace_later() -> None:
    """The limit is what is left before the event: what runs past it takes the time of the approval."""
    begun = time.monotonic()
    with pytest.raises(StepTimedOut):
        make("run", shell("trap '' TERM; while :; do sleep 0.05; done", grace_seconds=20), "W").run(
            occasion(seconds=1)
        )

    assert 0.9 < time.monotonic() - begun < 3


def test_a_description_of_any_length_does_not_keep_a_command_from_being_run() -> None:
    """Linux refuses a variable of 128 KiB, and with it every command of the rule."""
    make("run", ["true"], "W").run(occasion(event=reboot(description="x" * 140_000)))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
