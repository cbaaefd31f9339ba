"""HAProxy's runtime socket, played by a few lines. The real one is in e2e."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from forewarn.agent.steps import make_step
from forewarn.agent.steps.base import StepFailed
from tests.unit.agent.steps.build import context, reboot

HEAD = "# pxname,svname,qcur,qmax,scur,\n"


@contextmanager
def haproxy(*answers: str) -> Iterator[tuple[str, list[str]]]:
    """Answers one command a connection, and keeps it."""
    commands: list[str] = []

    def serve() -> None:
        with suppress(OSError):  # the test, or a timed out step, has ended
            for response in answers:
                connection, _ = listener.accept()
                with connection:
                    commands.append(connection.recv(4096).decode().strip())
                    connection.sendall(response.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", commands


def test_server_is_drained_and_its_sessions_awaited() -> None:
    with haproxy("\n", HEAD + "web,a,0,0,2,\n", HEAD + "web,a,0,0,0,\nweb,b,0,0,7,\n") as (
        address,
        commands,
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(
            context(is_simulated=True)
        )

    assert commands == ["set server web/a state drain", "show stat -1 4 -1", "show stat -1 4 -1"]


def test_server_is_ready_again_in_recover() -> None:
    with haproxy("\n") as (address, commands):
        make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(context("recover"))

    assert commands == ["set server web/a state ready"]


def test_resource_placeholder_drains_every_vm_of_the_event() -> None:
    """2017-03-01 prefixes names with an underscore."""
    with haproxy("\n", "\n") as (address, commands):
        spec = {"socket": address, "servers": ["web/{resource}"], "wait": False}
        make_step("haproxy", spec, "W").run(context(event=reboot(resources=("_web-0", "web-1"))))

    assert commands == ["set server web/web-0 state drain", "set server web/web-1 state drain"]


def test_resource_name_with_a_command_is_not_sent() -> None:
    """A semicolon begins the next command on HAProxy's socket."""
    evil = reboot(resources=("a;disable frontend f",))
    with (
        haproxy() as (address, commands),
        pytest.raises(StepFailed, match="not a valid server name"),
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/{resource}"]}, "W").run(
            context(event=evil)
        )

    assert commands == []


@pytest.mark.parametrize(
    "response", ["No such server.\n\n", "Permission denied\n\n", "Unknown command: 'set'\n"]
)
def test_any_response_of_haproxy_to_a_change_is_an_error(response: str) -> None:
    """It has no exit codes: success has an empty response."""
    with (
        haproxy(response) as (address, _),
        pytest.raises(StepFailed, match=f"HAProxy cannot set web/a to drain: {response.strip()}"),
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(context())


def test_remaining_sessions_are_reported_at_the_limit() -> None:
    busy = HEAD + "web,a,0,0,2,\n"
    with (
        haproxy("\n", *[busy] * 100) as (address, _),
        pytest.raises(StepFailed, match=r"timed out: .*sessions remain: {'web/a': 2}"),
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(
            context(is_simulated=True)
        )


def test_missing_row_does_not_mean_no_sessions() -> None:
    with (
        haproxy("\n", HEAD) as (address, _),
        pytest.raises(StepFailed, match="shows no sessions of web/a"),
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(context())


def test_haproxy_that_does_not_respond_fails_the_step() -> None:
    """By path or by port."""
    for address in ("/no/such.sock", "127.0.0.1:1"):
        with pytest.raises(StepFailed, match=f"HAProxy at {address} does not respond"):
            make_step("haproxy", {"socket": address, "servers": ["web/a"]}, "W").run(context())


@pytest.mark.parametrize(("phase", "state"), [("prepare", "drain"), ("recover", "ready")])
def test_unknown_server_does_not_block_the_others(phase: str, state: str) -> None:
    """An event names databases too. All servers are tried, and all failures reported."""
    unknown = "No such server.\n\n"
    with haproxy(unknown, "\n", unknown) as (address, commands):
        made = make_step(
            "haproxy", {"socket": address, "servers": ["web/{resource}"], "wait": False}, "W"
        )
        with pytest.raises(StepFailed) as failure:
            made.run(context(phase, event=reboot(resources=("a", "b", "c"))))

    assert commands == [f"set server web/{name} state {state}" for name in "abc"]
    assert failure.value.message == (
        f"HAProxy cannot set web/a to {state}: No such server.; "
        f"HAProxy cannot set web/c to {state}: No such server."
    )


def test_sessions_are_awaited_even_if_a_server_failed() -> None:
    """The rule may continue after a failure, and would cut these sessions."""
    busy, idle = HEAD + "web,b,0,0,2,\n", HEAD + "web,b,0,0,0,\n"
    with (
        haproxy("No such server.\n\n", "\n", busy, idle) as (address, commands),
        pytest.raises(StepFailed, match="web/a"),
    ):
        make_step("haproxy", {"socket": address, "servers": ["web/a", "web/b"]}, "W").run(
            context(is_simulated=True)
        )

    assert commands[2:] == ["show stat -1 4 -1", "show stat -1 4 -1"]


@pytest.mark.parametrize("resources", [("web-1", "web-2"), ("web-0", "web-1"), ()])
def test_vm_placeholder_is_this_vm_only(resources: tuple[str, ...]) -> None:
    """An agent on web-0 that drained web-1 too would make it ready while it is still down."""
    with haproxy("\n") as (address, commands):
        spec = {"socket": address, "servers": ["web/{vm}"]}
        make_step("haproxy", spec, "W").run(context("recover", event=reboot(resources=resources)))

    assert commands == ["set server web/web-0 state ready"]
