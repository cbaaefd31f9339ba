"""`forewarn hostd` and `forewarn serve` as real processes on loopback."""

from pathlib import Path

import pytest

from tests.e2e.cli_service import forewarn_process
from tests.e2e.host_daemon import HostDaemon, HostWorld, daemon_of, hosting, memory_of, vm
from tests.e2e.waiting import eventually

EXEC = ("--platform", "exec", "--exec-command", "*=true")
MEMORY_MB_MAX = 60


def waiting_command(folder: Path) -> tuple[str, ...]:
    """A command that notes its start, and ends when the file `go` exists."""
    script = folder / "reboot"
    script.write_text(
        f"#!/bin/sh\necho $1 >> {folder}/started\nwhile [ ! -e {folder}/go ]; do sleep 0.05; done\n"
    )
    script.chmod(0o755)
    return "--platform", "exec", "--exec-command", f"*={script} {{vm}}"


def wait_until_started(folder: Path, times: int = 1) -> None:
    file = folder / "started"
    eventually(
        lambda: file.read_text() if file.exists() else "", lambda text: text.count("\n") >= times
    )


def state_of(world: HostWorld) -> bool | None:
    """Whether the daemon of host-a is connected."""
    daemon = world.server.ask("GET", "/hosts/host-a")[1].get("daemon")
    return daemon["is_connected"] if daemon else None


def test_fleet_follows_the_inventory_of_a_host(tmp_path: Path) -> None:
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        assert world.vms()["web-0"]["host"] == "host-a"
        daemon.list_vms(vm("web-0", 1), vm("web-1", 2, power="stopped"), vm("web-2", 3))
        world.wait_for_vms("web-0", "web-1", "web-2")
        eventually(lambda: world.vms()["web-1"]["power"], lambda power: power == "stopped")
        daemon.list_vms(vm("web-0", 1))
        world.wait_for_vms("web-0")
        assert {"joined", "left"} <= set(world.changes())


def test_announced_restart_is_carried_out_on_its_host(tmp_path: Path) -> None:
    """The server runs no command, and knows no libvirt."""
    command = waiting_command(tmp_path)
    with hosting(tmp_path) as world, daemon_of(world, *command):
        world.wait_for_vms("web-0", "web-1")
        world.restart()
        wait_until_started(tmp_path)
        (event,) = world.server.poll()["Events"]
        assert (event["EventStatus"], event["Resources"]) == ("Started", ["web-0"])
        (tmp_path / "go").touch()
        world.wait_until_completed()
        assert (tmp_path / "started").read_text() == "web-0\n"
        assert {"started", "impacted", "completed"} <= set(world.changes())


def test_impact_is_continued_after_the_daemon_was_killed(tmp_path: Path) -> None:
    command = waiting_command(tmp_path)
    with hosting(tmp_path) as world, daemon_of(world, *command) as daemon:
        world.wait_for_vms("web-0", "web-1")
        world.restart()
        wait_until_started(tmp_path)
        daemon.kill()
        eventually(lambda: state_of(world), lambda state: state is False)
        daemon.start()
        wait_until_started(tmp_path, times=2)
        (tmp_path / "go").touch()
        world.wait_until_completed()
        assert "impact-failed" not in world.changes()


def test_impact_goes_on_while_its_server_is_killed(tmp_path: Path) -> None:
    """The VM is restarted once."""
    command = waiting_command(tmp_path)
    with hosting(tmp_path) as world, daemon_of(world, *command):
        world.wait_for_vms("web-0", "web-1")
        world.restart()
        wait_until_started(tmp_path)
        world.server.kill()
        (tmp_path / "go").touch()
        world.servers[0].start()
        world.wait_until_completed()
        assert (tmp_path / "started").read_text() == "web-0\n"
        assert "impact-failed" not in world.changes()


def test_another_server_takes_over_a_host(tmp_path: Path) -> None:
    command = waiting_command(tmp_path)
    with hosting(tmp_path, 2) as world, daemon_of(world, *command):
        world.wait_for_vms("web-0", "web-1")
        world.restart()
        wait_until_started(tmp_path)
        world.servers[0].kill()
        (tmp_path / "go").touch()
        world.wait_until_completed()
        assert (tmp_path / "started").read_text() == "web-0\n"
        eventually(lambda: state_of(world))


def test_impact_waits_for_an_unreachable_host(tmp_path: Path) -> None:
    """A clean stop makes the host unreachable at once; nothing fails meanwhile."""
    with (
        hosting(tmp_path, 1, "--impact-retry-seconds-max", "0") as world,
        daemon_of(world, *EXEC) as daemon,
    ):
        world.wait_for_vms("web-0", "web-1")
        assert daemon.stop() == 0
        assert state_of(world) is False
        world.restart()
        eventually(lambda: world.server.poll()["Events"][0]["EventStatus"] == "Started")
        daemon.start()
        world.wait_until_completed()
        assert "impact-failed" not in world.changes()


def test_second_daemon_of_a_host_does_not_start_beside_the_first(tmp_path: Path) -> None:
    """Even if the first one is stopped for so long that the servers have given it up."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC):
        world.wait_for_vms("web-0", "web-1")
        flags = ("--host", "host-a", "--server", world.server.control, "--token-file", "token")
        source = (*EXEC, "--inventory-command", "echo []")
        ended = forewarn_process("hostd", "--config", "/dev/null", *flags, *source, cwd=tmp_path)
        line = (
            "forewarn: another process on this machine is the daemon of host-a for"
            f" {world.server.control}; expected one daemon for each host\n"
        )
        assert (ended.returncode, ended.stderr) == (4, line)


def test_wrong_tokens_end_the_daemon_with_one_line(tmp_path: Path) -> None:
    def end(world: HostWorld, host: str) -> tuple[int, str]:
        flags = ("--host", host, "--server", world.server.control, "--token-file", "token")
        source = ("--platform", "simulated", "--inventory-command", "echo []")
        ended = forewarn_process("hostd", "--config", "/dev/null", *flags, *source, cwd=tmp_path)
        (line,) = [each for each in ended.stderr.splitlines() if each.startswith("forewarn: ")]
        return ended.returncode, line

    with hosting(tmp_path) as world:
        code, line = end(world, "host-b")
        assert code == 2
        assert "is for the host host-a, not for 'host-b' (status 403)" in line
        (tmp_path / "token").write_text(f"fw_host-a_{'0' * 64}")
        code, line = end(world, "host-a")
        assert code == 2
        assert "(status 401)" in line


def test_missing_bridge_is_one_clear_line(tmp_path: Path) -> None:
    """Not exit code 2: systemd tries again, because libvirt may create the bridge later."""
    (tmp_path / "token").write_text(f"fw_host-a_{'0' * 64}")
    flags = ("--host", "host-a", "--server", "http://127.0.0.1:9", "--token-file", "token")
    relay = ("--bridge", "fw-nobr0", "--metadata-server", "http://127.0.0.1:9")
    source = ("--platform", "simulated", "--inventory-command", "echo []")
    ended = forewarn_process(
        "hostd", "--config", "/dev/null", *flags, *relay, *source, cwd=tmp_path
    )
    assert (ended.returncode, ended.stderr) == (
        4,
        "forewarn: the bridge fw-nobr0 does not exist; expected a bridge of this host\n",
    )


def test_daemon_needs_little_memory(tmp_path: Path) -> None:
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        assert daemon.process is not None
        assert memory_of(daemon.process) <= MEMORY_MB_MAX


@pytest.mark.parametrize("is_first", [True, False])
def test_daemon_starts_without_a_server(tmp_path: Path, is_first: bool) -> None:
    """After a power failure, hosts and servers come up in any order."""
    world = HostWorld(tmp_path, 1)
    (server,) = world.servers
    server.control = f"http://{server.flags[server.flags.index('--control') + 1]}"
    daemon = HostDaemon(tmp_path, [server.control], "--inventory-command", "cat vms.json", *EXEC)
    daemon.list_vms(vm("web-0", 1))
    try:
        if is_first:
            daemon.start()
            eventually(lambda: "no server serves this host" in daemon.log.read_text())
            server.start()
        else:
            server.start()
            daemon.start()
        world.wait_for_vms("web-0")
    finally:
        daemon.kill()
        server.kill()
