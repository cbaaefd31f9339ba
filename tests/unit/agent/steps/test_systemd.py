"""Units, by a systemctl that writes down what it is asked. The real one is in e2e."""

from pathlib import Path

import pytest

from forewarn.agent.step import StepFailed, StepTimedOut
from forewarn.agent.steps import make
from tests.unit.agent.steps.build import occasion, script


def systemctl(folder: Path, *lines: str) -> str:
    return script(folder / "systemctl", f'echo "$@" >> {folder}/asked', *lines)


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


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
def test_units_are_stopped_in_their_order_and_started_in_the_reverse(
    tmp_path: Path, phase: str, action: str, expected: list[str]
) -> None:
    """The same line may stand in both phases; who needs something else says so."""
    spec = {"units": ["a", "b"], "action": action, "systemctl": systemctl(tmp_path)}
    make("systemd", spec, "W").run(occasion(phase))

    assert asked(tmp_path) == expected


def test_a_unit_that_does_not_stop_leaves_time_for_the_others(tmp_path: Path) -> None:
    """The machine goes down anyway: better one unit cut off than all."""
    spec = {
        "units": ["slow", "b"],
        "systemctl": systemctl(tmp_path, '[ "$3" = slow ] && sleep 600', "exit 0"),
    }
    with pytest.raises(StepTimedOut, match="systemctl was ended at its limit"):
        make("systemd", spec, "W").run(occasion(seconds=4))

    assert asked(tmp_path) == ["stop -- slow", "stop -- b"]


def test_what_systemctl_says_is_told(tmp_path: Path) -> None:
    """It knows best why."""
    spec = {"units": ["x"], "systemctl": systemctl(tmp_path, "echo Unit x not loaded.; exit 5")}
    with pytest.raises(StepFailed, match=r"systemctl ended with exit code 5: Unit x not loaded\."):
        make("systemd", spec, "W").run(occasion())


def test_a_machine_without_systemd_is_told_so() -> None:
    """Containers have none, and should hear it in these words."""
    spec = {"units": ["x"], "systemctl": "no-such-systemctl"}
    with pytest.raises(StepFailed, match="there is no no-such-systemctl on this machine"):
        make("systemd", spec, "W").run(occasion())
