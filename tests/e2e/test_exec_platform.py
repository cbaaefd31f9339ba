"""The operator's own commands, as real processes."""

import asyncio
import dataclasses
import errno
import os
import re
import resource
import shlex
import signal
import sys
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import replace

from forewarn.core.change import ChangeKind
from forewarn.core.event import Cause, EventType
from forewarn.core.fleet import Power, RedeployMethod, Vm
from forewarn.errors import ImpactFailed, Invalid
from forewarn.option_kind import ExecCommand
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.platform.exec import OUTPUT_BYTES_MAX, ExecPlatform
from tests.builders import guid
from tests.e2e.cli_service import ROOT, forewarn_process, soon
from tests.e2e.history_file import changes_in
from tests.e2e.service import Service, running

VM = Vm(name="web-0", host="host-a", address="10.0.0.10", id=guid(5).lower())
REBOOT = ImpactRequest(
    guid(1), "web", VM, EventType.REBOOT, Cause.RESTART, tries=2, duration_seconds=-1
)


def platform(
    *words: str, type_: str = "Reboot", seconds_max: float = 30.0, **environ: str
) -> ExecPlatform:
    command = ExecCommand(type_, words)
    return ExecPlatform(
        [command],
        seconds_max=seconds_max,
        environ={"PATH": os.environ["PATH"]} | environ,
        grace_seconds=0.5,
    )


def shell(script: str, **more: float) -> ExecPlatform:
    return platform("sh", "-c", script, **more)  # type: ignore[arg-type]


def carried_out(made: ExecPlatform, order: ImpactRequest = REBOOT) -> ImpactResult:
    return asyncio.run(made.run_impact(order))


@pytest.mark.parametrize(
    ("power", "cause", "is_back"),
    [
        (Power.RUNNING, Cause.MAINTENANCE, False),
        (Power.STOPPED, Cause.MAINTENANCE, True),
        (Power.STOPPED, Cause.RESTART, False),
    ],
)
def test_vm_that_stays_off_is_not_waited_for(power: Power, cause: Cause, is_back: bool) -> None:
    vm = replace(VM, power=power)
    request = ImpactRequest(guid(1), "web", vm, EventType.REBOOT, cause, tries=1)

    assert carried_out(shell("true"), request).is_back is is_back


def is_running(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def number_in(file: Path) -> int:
    soon(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


@pytest.mark.parametrize("left", range(4))
def test_file_descriptor_shortage_is_not_a_failed_try(left: int, tmp_path: Path) -> None:
    """It is told as what it is, so that the engine starts the command again instead of counting a
    failed try.
    """

    async def main() -> None:
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
        try:
            await platform("touch", str(tmp_path / "done")).run_impact(REBOOT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(OSError, match="Too many open files") as raised, asyncio.Runner() as runner:
        runner.run(main())
    assert raised.value.errno == errno.EMFILE
    assert not (tmp_path / "done").exists()


def test_command_gets_placeholders_as_arguments() -> None:
    done = carried_out(
        platform(
            "echo", "{vm}", "at {host}", "{event_type} {cause} {tries}", "awk {print $1} ${HOME}"
        )
    )

    assert done == ImpactResult(
        detail="web-0 at host-a Reboot user-restart 2 awk {print $1} ${HOME}", is_back=False
    )


def test_command_gets_variables_and_no_secrets() -> None:
    done = carried_out(platform("env", FOREWARN_STORE="sqlite:///secret.db", LANG="C.UTF-8"))

    result = dict(
        line.partition("=")[::2]
        for line in done.detail.splitlines()
        if line.startswith("FOREWARN_")
    )
    assert result == {
        "FOREWARN_EVENT_ID": guid(1),
        "FOREWARN_EVENT_TYPE": "Reboot",
        "FOREWARN_CAUSE": "user-restart",
        "FOREWARN_TRIES": "2",
        "FOREWARN_DURATION_SECONDS": "-1",
        "FOREWARN_SCOPE": "web",
        "FOREWARN_VM": "web-0",
        "FOREWARN_VM_ID": guid(5).lower(),
        "FOREWARN_ADDRESS": "10.0.0.10",
        "FOREWARN_HOST": "host-a",
        "FOREWARN_METHOD": "live",
    }
    assert "LANG=C.UTF-8" in done.detail


def test_command_gets_how_the_vm_may_be_moved() -> None:
    """Else the policy of the scope would be ignored here."""
    request = ImpactRequest(
        *(guid(1), "web", VM, EventType.REDEPLOY, Cause.MAINTENANCE, 1),
        method=RedeployMethod.LIVE_ONLY,
    )

    done = carried_out(
        platform("sh", "-c", "echo {method} $FOREWARN_METHOD", type_="Redeploy"), request
    )

    assert done.detail == "live-only live-only"


def test_command_runs_without_a_shell() -> None:
    assert carried_out(platform("echo", "$HOME; {vm} > `id`")).detail == "$HOME; web-0 > `id`"


def test_star_command_is_the_default() -> None:
    commands = [ExecCommand("*", ("echo", "any")), ExecCommand("Freeze", ("echo", "freeze"))]
    made = ExecPlatform(commands, seconds_max=30, environ=os.environ)

    assert carried_out(made).detail == "any"
    assert (
        carried_out(
            made, ImpactRequest(guid(1), "web", VM, EventType.FREEZE, Cause.MAINTENANCE, 1)
        ).detail
        == "freeze"
    )


def test_a_type_without_a_command_fails_with_a_clear_message() -> None:
    with pytest.raises(ImpactFailed, match="no command for Reboot; set exec_command for it"):
        carried_out(platform("true", type_="Freeze"))


def test_host_line_in_the_output_sets_the_new_host() -> None:
    assert carried_out(shell("echo moving; echo host=host-b; echo done")).host == "host-b"
    assert carried_out(shell("echo 'host=../etc'")).host == ""


def test_live_migration_without_a_host_line_fails() -> None:
    """A command that ignores `{cause}` has only suspended the VM, and would do so again."""
    request = ImpactRequest(guid(1), "web", VM, EventType.FREEZE, Cause.LIVE_MIGRATION, tries=1)

    with pytest.raises(
        ImpactFailed, match=r"sh printed no host=NAME: the VM was not moved$"
    ) as raised:
        carried_out(platform("sh", "-c", "echo suspended, resumed", type_="*"), request)
    assert raised.value.facts["is_final"]
    assert raised.value.facts["output"] == "suspended, resumed"

    moved = carried_out(platform("echo", "host=host-b", type_="Freeze"), request)
    assert (moved.host, moved.detail) == ("host-b", "host=host-b")


def test_nonzero_exit_code_fails_with_the_output() -> None:
    with pytest.raises(ImpactFailed, match=r"sh exited with 3$") as raised:
        carried_out(shell("echo out; echo why >&2; exit 3"))
    assert raised.value.facts["output"] == "out\nwhy"


def test_death_by_signal_is_a_failure() -> None:
    with pytest.raises(ImpactFailed, match=f"sh was killed by signal {int(signal.SIGSEGV)}"):
        carried_out(shell("kill -SEGV $$"))


def test_command_over_its_limit_is_killed_with_its_children(
    tmp_path: Path,
) -> None:
    """Even where parent and grandchild do not want to hear of it."""
    child = f"(trap '' TERM; exec sleep 600) & echo $! > {tmp_path}/child"
    script = f"trap '' TERM; echo $$ > {tmp_path}/parent; {child}; echo going; wait"

    with pytest.raises(
        ImpactFailed, match=r"did not finish within 0.5 seconds and was killed"
    ) as raised:
        carried_out(shell(script, seconds_max=0.5))

    assert raised.value.facts["output"] == "going"
    soon(
        lambda: (
            not is_running(number_in(tmp_path / "parent"))
            and not is_running(number_in(tmp_path / "child"))
        )
    )


def test_leftover_children_are_killed(tmp_path: Path) -> None:
    """It holds the pipe open: whoever reads to the end of that would wait ten minutes."""
    done = carried_out(shell(f"sleep 600 & echo $! > {tmp_path}/child; echo done"))

    assert done.detail == "done"
    soon(lambda: not is_running(number_in(tmp_path / "child")))


def test_endless_output_is_not_read_forever(tmp_path: Path) -> None:
    """Not even where it has left the command's group, and cannot be ended with it."""
    done = carried_out(shell(f"setsid sh -c 'echo $$ > {tmp_path}/child; exec yes' & sleep 0.2"))

    assert done.detail.startswith("y\n")
    soon(lambda: not is_running(number_in(tmp_path / "child")))


def test_only_the_tail_of_the_output_is_kept() -> None:
    done = carried_out(shell("head -c 50000000 /dev/zero | tr '\\0' x; echo; echo the end"))

    assert done.detail.endswith("x\nthe end")
    assert len(done.detail) < OUTPUT_BYTES_MAX


def test_binary_output_is_accepted() -> None:
    assert (
        carried_out(shell(r"printf '\377\376\000ok'")).detail
        == "\N{REPLACEMENT CHARACTER}" * 2 + "\0ok"
    )


def test_cancelled_command_is_killed_with_its_children(tmp_path: Path) -> None:
    async def main() -> None:
        work = asyncio.create_task(
            shell(f"sleep 600 & echo $! > {tmp_path}/child; wait").run_impact(REBOOT)
        )
        while not (tmp_path / "child").exists():
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(main())

    soon(lambda: not is_running(number_in(tmp_path / "child")))


def test_children_get_the_grace_period_after_their_shell_dies(tmp_path: Path) -> None:
    """A shell without a trap is gone at the TERM; the child that has to clean up is still there."""
    child = (
        f"trap 'sleep 0.1; echo clean > {tmp_path}/end; exit' TERM; echo > {tmp_path}/begun; while"
        " :; do sleep 0.05; done"
    )
    with pytest.raises(ImpactFailed, match="and was killed"):
        carried_out(shell(f"sh -c {shlex.quote(child)} & wait", seconds_max=0.5))

    assert (tmp_path / "begun").exists()
    assert (tmp_path / "end").read_text() == "clean\n"


def documented_freezes(folder: Path) -> list[str]:
    """Each Freeze of docs/platforms.md, for a wait of ten minutes, and the programs that it calls.

    The programs only log what they do, and no signal ends them halfway.
    """
    for name in ("qm", "openstack", "virsh"):
        program = folder / name
        program.write_text(
            f"#!/bin/sh\ntrap '' TERM\necho \"begin $*\" >> {folder}/log\nsleep 0.3\n"
            f'echo "end $*" >> {folder}/log\n'
        )
        program.chmod(0o755)
    page = (ROOT / "docs" / "platforms.md").read_text()
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    commands = [
        command.replace("sleep 9", "sleep 600")
        for example in examples
        for command in tomllib.loads(example).get("exec_command", ())
        if command.startswith("Freeze=")
    ]
    assert len(commands) == 3
    assert all("sleep 600" in command for command in commands)
    return commands


def lines_in(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("example", range(3))
@pytest.mark.parametrize("lines", [1, 2], ids=["while it suspends", "while it waits"])
def test_documented_freeze_that_is_canceled_resumes_the_vm(
    tmp_path: Path, example: int, lines: int
) -> None:
    """One signal, whenever it comes: the command is killed if it does not end soon after that."""
    kind, _, words = documented_freezes(tmp_path)[example].partition("=")
    log = tmp_path / "log"
    exec_platform = ExecPlatform(
        [ExecCommand(kind, tuple(shlex.split(words)))],
        seconds_max=30,
        environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    request = ImpactRequest(
        guid(1), "web", VM, EventType.FREEZE, Cause.MAINTENANCE, tries=1, duration_seconds=9
    )

    async def main() -> None:
        impact = asyncio.create_task(exec_platform.run_impact(request))
        while len(lines_in(log)) < lines:
            await asyncio.sleep(0.01)
        impact.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impact

    asyncio.run(main())

    actions = re.findall(r"^(begin|end) .*?(suspend|resume|unpause|pause)", log.read_text(), re.M)
    suspend, resume = ("pause", "unpause") if "openstack" in words else ("suspend", "resume")
    assert actions == [("begin", suspend), ("end", suspend), ("begin", resume), ("end", resume)]


COLD_MOVE = ImpactRequest(
    *(guid(1), "web", Vm(name="vm-101", host="pve1", id=guid(5).lower())),
    *(EventType.REDEPLOY, Cause.MAINTENANCE, 1),
    method=RedeployMethod.COLD,
)


@pytest.mark.parametrize(
    ("method", "is_final"),
    [(RedeployMethod.COLD, True), (RedeployMethod.LIVE, False), (RedeployMethod.LIVE_ONLY, False)],
)
@pytest.mark.parametrize("script", ["exit 2", "kill -SEGV $$", "sleep 600"])
def test_failed_command_of_a_cold_move_is_not_repeated(
    method: RedeployMethod, is_final: bool, script: str
) -> None:
    """It may have stopped the VM before it failed, and would stop it again."""
    made = platform("sh", "-c", script, type_="Redeploy", seconds_max=0.5)

    with pytest.raises(ImpactFailed) as raised:
        carried_out(made, dataclasses.replace(COLD_MOVE, method=method))
    assert raised.value.facts["is_final"] is is_final


def test_failed_command_that_moves_nothing_is_repeated() -> None:
    """The policy of its scope is about moves."""
    with pytest.raises(ImpactFailed, match="exited with 2") as raised:
        carried_out(shell("exit 2"), dataclasses.replace(REBOOT, method=RedeployMethod.COLD))
    assert not raised.value.facts["is_final"]


def documented_move(folder: Path, script: str, **programs: str) -> ExecPlatform:
    """A script of docs/platforms.md that moves a VM, with stand-ins for the programs that it calls.

    They log their actions; the file `power` says whether the VM runs.
    """
    page = (ROOT / "docs" / "platforms.md").read_text()
    (text,) = re.findall(rf"`/usr/local/bin/{script}`:\n\n```sh\n(.*?)```", page, re.DOTALL)
    for name, content in {script: text, **programs}.items():
        (folder / name).write_text(content if name == script else f"#!/bin/sh\n{content}")
        (folder / name).chmod(0o755)
    return ExecPlatform(
        [ExecCommand("Redeploy", (str(folder / script),))],
        seconds_max=30,
        environ={"PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder)},
    )


def proxmox_move(folder: Path, power: str, migrate: str) -> ExecPlatform:
    """VM 101 is on pve1; pve2 has the most free memory. `migrate` is what `qm migrate` does."""
    (folder / "power").write_text(f"{power}\n")
    qm = f"""
power=$(cat $FOLDER/power)
test $1 = status || echo "$node $*" >> $FOLDER/log
case $1 in
status) echo "status: $power" ;;
shutdown) test $power = running || exit 255; echo stopped > $FOLDER/power ;;
migrate) {migrate} ;;
start) test $power = stopped || exit 255; echo running > $FOLDER/power ;;
esac
"""
    ssh = 'export node=$1; shift; exec "$@"'
    return documented_move(folder, "move-vm", qm=qm, ssh=ssh, pvesh="echo []", jq="echo pve2")


def proxmox_log(folder: Path) -> tuple[str, list[str]]:
    return (folder / "power").read_text().strip(), lines_in(folder / "log")


SHUTDOWN = "pve1 shutdown 101 --timeout 120 --forceStop 1"


def test_documented_proxmox_move_stops_a_cold_vm_once(tmp_path: Path) -> None:
    made = proxmox_move(tmp_path, "running", migrate="true")

    assert carried_out(made, COLD_MOVE).host == "pve2"
    log = [SHUTDOWN, "pve1 migrate 101 pve2", "pve2 start 101"]
    assert proxmox_log(tmp_path) == ("running", log)


def test_documented_proxmox_move_that_fails_starts_the_vm_again(tmp_path: Path) -> None:
    """A VM with a disk on local storage, say. There is no other try."""
    made = proxmox_move(tmp_path, "running", migrate="echo local disk; exit 2")

    with pytest.raises(ImpactFailed, match="move-vm exited with 2") as raised:
        carried_out(made, COLD_MOVE)
    assert raised.value.facts == {"output": "local disk", "is_final": True}
    log = [SHUTDOWN, "pve1 migrate 101 pve2", "pve1 start 101"]
    assert proxmox_log(tmp_path) == ("running", log)


def test_documented_proxmox_move_that_is_canceled_starts_the_vm_again(tmp_path: Path) -> None:
    made = proxmox_move(tmp_path, "running", migrate="sleep 600")

    async def main() -> None:
        impact = asyncio.create_task(made.run_impact(COLD_MOVE))
        while len(lines_in(tmp_path / "log")) < 2:
            await asyncio.sleep(0.01)
        impact.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impact

    asyncio.run(main())

    log = [SHUTDOWN, "pve1 migrate 101 pve2", "pve1 start 101"]
    assert proxmox_log(tmp_path) == ("running", log)


def test_documented_proxmox_move_that_was_interrupted_only_starts_the_vm(tmp_path: Path) -> None:
    """The node of the service was lost after the shutdown."""
    made = proxmox_move(tmp_path, "stopped", migrate="true")

    with pytest.raises(ImpactFailed, match="move-vm exited with 1"):
        carried_out(made, dataclasses.replace(COLD_MOVE, tries=2))
    assert proxmox_log(tmp_path) == ("running", ["pve1 start 101"])


def test_documented_proxmox_move_leaves_a_vm_off_that_was_off(tmp_path: Path) -> None:
    """Its owner has stopped it."""
    made = proxmox_move(tmp_path, "stopped", migrate="true")

    assert carried_out(made, COLD_MOVE).host == "pve2"
    assert proxmox_log(tmp_path) == ("stopped", ["pve1 migrate 101 pve2 --online"])


@pytest.mark.parametrize(
    ("before", "after", "reboots"),
    [("ACTIVE", "ERROR", 1), ("ACTIVE", "ACTIVE", 0), ("SHUTOFF", "ERROR", 0)],
    ids=["stopped by Nova", "not stopped", "stopped by its owner"],
)
@pytest.mark.parametrize("code", [0, 1], ids=["confirm fails", "migrate fails"])
def test_documented_openstack_move_that_fails_starts_the_server_again(
    tmp_path: Path, before: str, after: str, reboots: int, code: int
) -> None:
    """Some releases of the client exit with 0 if the migration has failed."""
    (tmp_path / "power").write_text(before)
    openstack = f"""
echo "$*" >> $FOLDER/log
case $2 in
show) cat $FOLDER/power ;;
migrate) echo {after} > $FOLDER/power; exit {code} ;;
migration) exit 1 ;;
esac
"""
    made = documented_move(tmp_path, "move-server", openstack=openstack)

    with pytest.raises(ImpactFailed, match="move-server exited with 1"):
        carried_out(made, COLD_MOVE)
    log = [line for line in lines_in(tmp_path / "log") if "reboot" in line]
    assert log == [f"server reboot --hard --wait {guid(5).lower()}"] * reboots


def test_stopping_service_lets_commands_clean_up(tmp_path: Path) -> None:
    """As the Freeze of docs/platforms.md: what was suspended is resumed, though its wait is cut
    short.
    """
    script = (
        f"trap 'sleep 0.3; echo resumed > {tmp_path}/vm' EXIT; trap exit TERM;"
        f" echo suspended > {tmp_path}/vm; sleep 600 & wait"
    )
    with running(
        tmp_path, "--platform", "exec", "--exec-command", f"*=sh -c {shlex.quote(script)}"
    ) as service:
        assert service.ask("POST", "/vms/web-0/restart")[0] == 202
        soon((tmp_path / "vm").exists)
        assert service.stop() == 0

    assert (tmp_path / "vm").read_text() == "resumed\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_command_ends_with_its_server_before_another_one_tries_again(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The lease of the server ends, and two tries must not act on the VM at the same time."""
    script = f"trap 'echo > {tmp_path}/end; exit' TERM; echo > {tmp_path}/begun; sleep 600 & wait"
    flags = ("--platform", "exec", "--exec-command", f"*=sh -c {shlex.quote(script)}")
    with running(tmp_path, *flags) as service:
        assert service.ask("POST", "/vms/web-0/restart")[0] == 202
        soon((tmp_path / "begun").exists)
        assert service.process is not None
        service.process.send_signal(number)
        soon((tmp_path / "end").exists)
        service.kill()


def test_command_that_ignores_sigterm_does_not_block_shutdown(tmp_path: Path) -> None:
    script = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 1; done"
    with running(
        tmp_path, "--platform", "exec", "--exec-command", f"*=sh -c {shlex.quote(script)}"
    ) as service:
        assert service.ask("POST", "/vms/web-0/restart")[0] == 202
        pid = number_in(tmp_path / "pid")
        assert service.stop() == 0

    assert not is_running(pid)


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        carried_out(platform("true"))

    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("program", ["/nowhere/reset-vm", "/etc/passwd", "reset-vm-nowhere"])
def test_missing_program_is_refused_at_startup(program: str) -> None:
    with pytest.raises(Invalid, match="not found or not executable"):
        platform(program)


def test_the_service_refuses_to_start_without_any_command() -> None:
    refused = forewarn_process(
        "serve",
        "--platform",
        "exec",
        "--store",
        "memory",
        "--metadata",
        "127.0.0.1:0",
        "--control",
        "127.0.0.1:0",
    )

    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "forewarn: the exec platform has no command; expected exec_command"
    )


def test_failed_command_is_retried_and_then_recorded(
    tmp_path: Path,
) -> None:
    """Through a real service: each try is noted with its output, and the event leaves the document
    as failed.
    """
    script = tmp_path / "reset-vm"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nprint('reset', *sys.argv[1:])\nsys.exit(sys.argv[1] =="
        " 'db')\n"
    )
    script.chmod(0o755)
    flags = (
        "--platform",
        "exec",
        "--exec-command",
        f"*={shlex.quote(str(script))} {{vm}} {{tries}}",
    )
    with running(tmp_path, *flags, "--impact-retry-seconds-max", "1") as service:
        assert service.ask("POST", "/vms/web-0/restart")[0] == 202
        assert service.ask("POST", "/vms/db/restart")[0] == 202
        soon(lambda: ChangeKind.FAILED in [change.what for change in changes_in(tmp_path, "db")])
        soon(
            lambda: ChangeKind.COMPLETED in [change.what for change in changes_in(tmp_path, "web")]
        )

    assert [
        change.detail
        for change in changes_in(tmp_path, "web")
        if change.what is ChangeKind.IMPACTED
    ] == ["reset web-0 1"]
    failures = [
        change.detail
        for change in changes_in(tmp_path, "db")
        if change.what is ChangeKind.IMPACT_FAILED
    ]
    assert failures == [f"{script} exited with 1\nreset db {tries}" for tries in (1, 2)]


def restart_until_booting(service: Service, folder: Path) -> str:
    """A guest polls, approves its restart, and the command has ended; returns the event's id."""
    service.poll()
    event_id: str = service.ask("POST", "/vms/web-0/restart")[1]["event"]["id"]
    assert service.approve(event_id) == 200
    soon(lambda: ChangeKind.RESTARTED in [change.what for change in changes_in(folder, "web")])
    return event_id


def details_of(folder: Path, what: ChangeKind) -> list[str]:
    return [change.detail for change in changes_in(folder, "web") if change.what is what]


def test_event_stays_until_the_restarted_vm_polls_again(tmp_path: Path) -> None:
    """The command resets a VM in a moment, and the guest needs longer to come up."""
    flags = ("--platform", "exec", "--exec-command", "Reboot=echo reset {vm}")
    with running(tmp_path, *flags) as service:
        event_id = restart_until_booting(service, tmp_path)

        status, event = service.ask("GET", f"/events/{event_id}")
        assert (status, event["impacts"][0]["state"]) == (200, "booting")
        (shown,) = service.poll(vm="web-1")["Events"]  # a peer
        assert (shown["EventId"], shown["EventStatus"]) == (event_id, "Started")
        assert service.ask("GET", f"/events/{event_id}")[0] == 200

        (shown,) = service.poll(vm="web-0")["Events"]  # its document as it was when it came up
        assert shown["EventId"] == event_id
        soon(lambda: service.poll(vm="web-1")["Events"] == [])

    assert details_of(tmp_path, ChangeKind.RESTARTED) == ["reset web-0"]
    assert details_of(tmp_path, ChangeKind.IMPACTED) == ["polled again"]


def test_event_ends_at_the_limit_if_the_vm_stays_away(tmp_path: Path) -> None:
    flags = ("--platform", "exec", "--exec-command", "Reboot=echo reset {vm}")
    with running(tmp_path, *flags, "--back-seconds-max", "0.5") as service:
        restart_until_booting(service, tmp_path)
        soon(lambda: service.poll(vm="web-1")["Events"] == [])

    assert details_of(tmp_path, ChangeKind.IMPACTED) == ["not back after 0.5 seconds"]


def test_booting_vm_may_poll_any_server_even_after_a_restart(tmp_path: Path) -> None:
    """The server that ran the command was killed: the wait is in the store."""
    flags = ("--platform", "exec", "--exec-command", "Reboot=echo reset {vm}")
    with running(tmp_path, *flags) as service:
        event_id = restart_until_booting(service, tmp_path)
        service.kill()
        service.start()
        assert [event["EventId"] for event in service.poll(vm="web-1")["Events"]] == [event_id]
        service.poll(vm="web-0")
        soon(lambda: service.poll(vm="web-1")["Events"] == [])

    assert details_of(tmp_path, ChangeKind.IMPACTED) == ["polled again"]
