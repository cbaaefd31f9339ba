"""Problems of hosts and VMs, in the console and on the command line: nothing looks healthy."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.e2e.cli_service import forewarn
from tests.e2e.console_page import ConsolePage, console
from tests.e2e.host_daemon import HostWorld, daemon_of, hosting, vm
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system
AWAY = "its daemon has been away since"
POLL_EVERY_SECONDS = 1.0
UNSERVED_SECONDS_MAX = 100
"""A VM is shown after a minute, and servers look every five seconds."""
EXEC = ("--platform", "exec", "--exec-command", "*=true")


def ask(world: HostWorld, *arguments: str) -> str:
    server = world.server
    done = forewarn("--control-url", server.control, *arguments, FOREWARN_TOKEN=server.token)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sign_in(page: ConsolePage, world: HostWorld) -> None:
    page.page.goto(f"{page.url}/#/")
    page.page.get_by_label("Token").fill(world.server.token)
    page.page.get_by_role("button", name="Sign in").click()
    page.page.wait_for_selector("main[data-ready] #sentence")


def request_work(world: HostWorld, **more: Any) -> None:
    """A request of a daemon with bridges, which is connected for some seconds then."""
    body = {"session": "s", "machine": "m", **more}
    token = (world.folder / "token").read_text()
    eventually(
        lambda: world.server.ask("POST", "/hosts/host-a/work", body, token=token),
        lambda answered: answered[0] == 200,  # 503 until the server has its lease
    )


def test_dead_host_is_shown_with_the_reason_everywhere(tmp_path: Path) -> None:
    """An operator who looks at one page, whichever it is, must not conclude that all is well."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        daemon.list_vms(vm("web-0", 1), vm("web-1", 2), vm("web-1", 3))
        eventually(
            lambda: world.server.ask("GET", "/hosts/host-a")[1]["problems"], lambda found: found
        )
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            expect(page.locator("#sentence")).to_have_text("1 VM is not accepted.")
            expect(page.locator(".attention")).to_contain_text("web-1")
            daemon.list_vms(vm("web-0", 1), vm("web-1", 2))
            expect(page.locator("#sentence")).to_have_text("All quiet.")
            expect(page.locator(".attention")).to_be_hidden()

            daemon.kill()
            expect(page.locator("#sentence")).to_have_text("1 host is unreachable.")
            attention = page.locator(".attention")
            expect(attention).to_contain_text(f"host-a: {AWAY} 20")
            expect(attention).to_contain_text("Affects 2 VMs")
            assert watched.find_accessibility_problems() == []

            world.server.poll(vm="web-0")
            event = world.restart("web-0")
            expect(page.locator("#sentence")).to_have_text(
                "1 host is unreachable, 1 event under impact."
            )
            watched.view(f"#/events/{event}")
            row = page.get_by_role("region", name="Impacts").locator("tbody tr")
            expect(row).to_contain_text("waiting")
            expect(row).to_contain_text(f"Waits for the daemon of host-a: {AWAY}")
            watched.view("#/hosts")
            expect(page.locator("tbody tr")).to_contain_text(AWAY)
            watched.view("#/fleet")
            expect(page.get_by_role("link", name="web-1: host unreachable")).to_be_visible()
            watched.view("#/vms/web-1")
            expect(page.locator("main")).to_contain_text("running when its host was last reached")
            expect(page.locator("main")).to_contain_text("its host host-a is unreachable")
            page.get_by_role("button", name="Redeploy").click()
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("the impact waits for the daemon")
            dialog.get_by_role("button", name="Redeploy web-1").click()
            expect(dialog.get_by_role("status")).to_contain_text(
                re.compile(
                    "Announced.* The impact waits for the daemon of host-a: its daemon has been"
                )
            )
            dialog.get_by_role("button", name="Close").click()
            watched.view("#/hosts/host-a")
            expect(page.locator(".answer")).to_contain_text(f"Unknown: {AWAY}")

        listed = ask(world, "vm", "list", "--host", "host-a")
        assert len(re.findall("running +host-unreachable", listed)) == 2
        assert AWAY in ask(world, "host", "show", "host-a")
        assert "its host host-a is unreachable: " in ask(world, "vm", "show", "web-0")
        assert "waits for the daemon of host-a: its daemon has been away" in ask(
            world, "event", "show", event
        )


def test_vm_of_a_dead_host_is_marked_whatever_else_is_true_of_it(tmp_path: Path) -> None:
    """An event does not hide that its power is only as last reported."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        world.server.poll(vm="web-0")
        for name in ("web-0", "web-1"):
            ask(world, "vm", "redeploy", name)
        impact = world.server.ask("GET", "/events")[1]["events"]
        (event,) = (each["id"] for each in impact if each["resources"] == ["web-1"])
        daemon.kill()
        eventually(lambda: AWAY in ask(world, "host", "show", "host-a"))
        world.server.ask("POST", f"/events/{event}/approve")
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            watched.view("#/fleet")
            notice = page.get_by_role("link", name="web-0: in notice, host unreachable")
            expect(notice).to_have_text("▲!")
            impact = page.get_by_role("link", name="web-1: under impact, host unreachable")
            expect(impact).to_have_text("◆!")
            state = page.get_by_label("State", exact=True)
            for word, number in (("host unreachable", 2), ("in notice", 1), ("quiet", 0)):
                state.select_option(word)
                expect(page.locator("a.tile:visible")).to_have_count(number)
            state.select_option("host unreachable")
            expect(page.locator(".legend")).to_contain_text("host unreachable 2")
            assert watched.find_accessibility_problems() == []
            watched.view("#/vms/web-0")
            expect(page.locator("main")).to_contain_text("running when its host was last reached")


def test_daemon_that_cannot_act_is_connected_and_says_why(tmp_path: Path) -> None:
    """Since when it is connected is not since when it cannot act."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        (daemon.folder / "vms.json").unlink()
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            expect(page.locator("#sentence")).to_have_text("1 host is unreachable.")
            watched.view("#/hosts/host-a")
            answer = page.locator(".verdict")
            expect(answer).to_contain_text("Unknown: ")
            expect(answer).to_contain_text("Look at the host itself before you touch it.")
            expect(answer).not_to_contain_text("That was")
            expect(page.locator("main")).to_contain_text(re.compile(r"connected since \d\d:"))


def test_bridge_that_is_not_served_is_shown_with_the_reason(tmp_path: Path) -> None:
    """The daemon is connected, so nothing else shows that its guests cannot read."""
    reason = "the port vnet3 of the bridge br0 does not learn MACs"
    unserved = {"bridge": "br0", "problem": reason, "vms": 2}
    with hosting(tmp_path) as world:

        def work() -> None:
            request_work(world, unserved=[unserved])

        work()
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            work()
            expect(page.locator("#sentence")).to_have_text("1 bridge is not served.")
            text = f"the bridge br0, with 2 VMs, is not served: {reason}"
            expect(page.locator(".attention")).to_contain_text(f"host-a: {text}")
            assert watched.find_accessibility_problems() == []
            work()
            watched.view("#/hosts")
            expect(page.locator("tbody tr")).to_contain_text(f"connected{text}")
            work()
            watched.view("#/hosts/host-a")
            expect(page.locator("main")).to_contain_text(f"bridge unserved {text}")


def test_vm_that_gets_only_errors_is_shown_with_the_reason(tmp_path: Path) -> None:
    """It polls, so it does not count as silent."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC):
        world.wait_for_vms("web-0", "web-1")

        def is_shown() -> bool:
            world.server.poll(vm="web-0", version="1999-01-01")
            time.sleep(POLL_EVERY_SECONDS)
            return bool(world.vms()["web-0"]["problems"])

        eventually(is_shown, seconds_max=UNSERVED_SECONDS_MAX)
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            expect(page.locator("#sentence")).to_have_text("1 VM gets no document.")
            reason = re.compile("has received only errors since 20.*: status 404, ")
            expect(page.locator(".attention")).to_contain_text(reason)
            assert watched.find_accessibility_problems() == []
            watched.view("#/fleet")
            link = page.get_by_role("link", name="web-0: gets no document")
            expect(link).to_be_visible()
            watched.view("#/vms/web-0")
            expect(page.locator("main")).to_contain_text(reason)

            world.server.poll(vm="web-0")
            watched.view("#/")
            expect(page.locator("#sentence")).to_have_text("All quiet.", timeout=30_000)


def test_event_that_is_due_and_does_not_start_says_that_its_vm_cannot_read_it(
    tmp_path: Path,
) -> None:
    """Its host was lost. It reads through the daemon of its host, which has a bridge."""
    with hosting(tmp_path) as world:
        request_work(world, inventory={"vms": [vm("web-0", 1)]})
        world.wait_for_vms("web-0")
        world.server.poll(vm="web-0")
        eventually(lambda: AWAY in ask(world, "host", "show", "host-a"))
        said = ask(world, "vm", "evict", "web-0")
        assert f"\nthe impact waits for the daemon of host-a: {AWAY} 20" in said
        (event,) = world.server.ask("GET", "/events")[1]["events"]
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            sign_in(watched, world)
            watched.view(f"#/events/{event['id']}")
            expect(watched.page.locator("main")).to_contain_text(
                "its VMs have not been able to read it since", timeout=90_000
            )
            waits_for = f"the daemon of host-a: {AWAY} 20"
            expect(watched.page.locator("dl")).to_contain_text(f"Waits for{waits_for}")
            assert watched.find_accessibility_problems() == []
            watched.view("#/")
            row = watched.page.get_by_role("region", name="Events whose approval is missing")
            expect(row).to_contain_text(f"Waits for {waits_for}")
            expect(watched.page.locator(".lead").first).not_to_contain_text("Next deadline")
            watched.view("#/hosts/host-a")
            expect(watched.page.locator(".verdict")).not_to_contain_text("until")
            watched.view("#/vms/web-0")
            expect(watched.page.locator("main")).to_contain_text(f"waits for {waits_for}")
        shown = ask(world, "event", "show", event["id"])
        assert re.search(rf"^waits for +{waits_for}", shown, re.MULTILINE)
        assert re.search(r"^unreadable since +20\d\d-", shown, re.MULTILINE)


def test_vm_on_two_hosts_is_shown_everywhere(tmp_path: Path) -> None:
    """Both copies write to its disk, and the console is where an operator looks first."""
    other = tmp_path / "host-b"
    other.mkdir()
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as first:
        world.wait_for_vms("web-0", "web-1")
        token = ask(world, "token", "create", "host-b", "--role", "host", "--host", "host-b")
        (other / "token").write_text(token.strip())
        with (
            daemon_of(world, *EXEC, folder=other, host="host-b") as second,
            console(world.server.control) as watched,
        ):
            second.list_vms(vm("web-0", 1))
            watched.allowed.append("the server responded with a status of 401")
            page = watched.page
            sign_in(watched, world)
            expect(page.locator("#sentence")).to_have_text(re.compile("^1 VM runs on two hosts"))
            attention = page.locator(".attention")
            text = "it runs on host-a and host-b: stop all but one"
            expect(attention).to_contain_text(text)
            expect(attention.locator(".duplicate").first).to_be_visible()
            assert watched.find_accessibility_problems() == []
            watched.view("#/fleet")
            expect(page.get_by_role("link", name="web-0: on two hosts")).to_be_visible()
            watched.view("#/vms/web-0")
            expect(page.locator("main")).to_contain_text(text)

            event = world.restart("web-0")
            watched.view(f"#/events/{event}")
            row = page.get_by_role("region", name="Impacts").locator("tbody tr")
            expect(row).to_contain_text(f"Waits for other hosts: {text}")
            assert "duplicate" in ask(world, "vm", "list")
            assert text in ask(world, "vm", "show", "web-0")
            assert f"waits for other hosts: {text}" in ask(world, "event", "show", event)

            first.list_vms(vm("web-1", 2))
            watched.view("#/")
            expect(page.locator("#sentence")).not_to_contain_text("two hosts")


def test_host_that_runs_a_vm_which_the_fleet_has_elsewhere_is_not_empty(tmp_path: Path) -> None:
    """The fleet has no VM on it, so that nothing is notified: an operator must not touch it."""
    other = tmp_path / "host-b"
    other.mkdir()
    with hosting(tmp_path) as world, daemon_of(world, *EXEC):
        world.wait_for_vms("web-0", "web-1")
        token = ask(world, "token", "create", "host-b", "--role", "host", "--host", "host-b")
        (other / "token").write_text(token.strip())
        with (
            daemon_of(world, *EXEC, folder=other, host="host-b") as second,
            console(world.server.control) as watched,
        ):
            second.list_vms(vm("web-1", 2))
            watched.allowed.append("the server responded with a status of 401")
            page, dialog = watched.page, watched.page.get_by_role("dialog")
            sign_in(watched, world)
            expect(page.locator("#sentence")).to_have_text("1 VM runs on two hosts.")
            watched.view("#/hosts/host-b")
            verdict = page.locator(".verdict")
            expect(verdict).to_contain_text("No: 1 VM would be interrupted.")
            expect(verdict).to_contain_text(
                "web-1 runs here, and the fleet has it on host-a: it is not notified"
            )
            expect(verdict).not_to_contain_text("Maintain it below")
            expect(page.locator("main")).to_contain_text("web-1 runs on host-a and host-b: stop")
            assert watched.find_accessibility_problems() == []
            page.get_by_role("button", name="Maintain").click()
            expect(dialog).to_contain_text("that the fleet does not have there, and are not")
            dialog.get_by_role("button", name="Maintain").click()
            warning = "host-b runs web-1, which the fleet does not have there: it is not notified"
            expect(dialog).to_contain_text(warning)
            dialog.get_by_role("button", name="Close").click()
            watched.view("#/campaigns/new")
            page.get_by_label("Hosts", exact=True).fill("host-b")
            page.get_by_role("button", name="Preview the plan").click()
            expect(page.locator("main")).to_contain_text(warning)
            assert f"warning: {warning}" in ask(
                world, "host", "maintain", "host-b", "--type", "Reboot"
            )

            second.list_vms(vm("web-1", 77))  # another id: it is not accepted
            watched.view("#/hosts/host-b")
            expect(verdict).to_contain_text("runs here, and is not in the fleet")


def test_operator_is_told_that_a_host_is_away_and_forgets_its_daemon(tmp_path: Path) -> None:
    """What a dialog promises is read when it opens."""
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        world.server.poll(vm="web-0")
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page, dialog = watched.page, watched.page.get_by_role("dialog")
            sign_in(watched, world)
            watched.view("#/hosts/host-a")
            maintain = page.get_by_role("button", name="Maintain")
            maintain.click()
            expect(dialog).to_contain_text("Pauses 2 VMs of 1 scope for some seconds.")
            expect(dialog).not_to_contain_text("Nothing can be done there now")
            dialog.get_by_role("button", name="Not now").click()
            expect(page.get_by_role("button", name="Forget its daemon")).to_have_count(0)

            daemon.kill()
            expect(page.locator(".answer")).to_contain_text(f"Unknown: {AWAY}")
            maintain.click()
            expect(dialog).to_contain_text(
                "Nothing can be done there now: its daemon has been away"
            )
            assert watched.find_accessibility_problems() == []
            dialog.get_by_role("button", name="Maintain").click()
            expect(dialog).to_contain_text("2 events announced.")
            dialog.get_by_role("button", name="Close").click()

            page.get_by_role("button", name="Forget its daemon").click()
            known = dialog.get_by_label("What is known of its 2 VMs?")
            expect(dialog).to_contain_text("nothing starts them elsewhere")
            known.select_option("fenced")
            expect(dialog).to_contain_text("a VM that still runs would run twice")
            known.select_option("still_running")
            assert watched.find_accessibility_problems() == []
            dialog.get_by_role("button", name="Forget it").click()
            expect(dialog).to_contain_text("Forgotten.")
            dialog.get_by_role("button", name="Close").click()
            expect(page.locator("main")).to_contain_text("the server acts on this host itself")
            expect(page.locator(".answer")).to_have_text("No: 2 VMs would be interrupted.")
            expect(page.locator("main")).to_contain_text("left running")
            maintain.click()
            expect(dialog).to_contain_text("what may run there is left running")
            page.keyboard.press("Escape")
            assert "left-running" in ask(world, "host", "list")
            watched.view("#/vms/web-0")
            expect(page.locator("main")).to_contain_text("unknown")
            assert {each["power"] for each in world.vms().values()} == {"unknown"}

            for event in world.server.ask("GET", "/events")[1]["events"]:
                for verb in ("cancel", "complete"):  # it is scheduled, or has started
                    world.server.ask("POST", f"/events/{event['id']}/{verb}")
            watched.view("#/hosts/host-a")
            page.get_by_role("button", name="Forget it as fenced").click()
            expect(dialog).to_contain_text("a VM that still runs would run twice")
            dialog.get_by_role("button", name="Forget it").click()
            expect(dialog).to_contain_text("Forgotten.")
            dialog.get_by_role("button", name="Close").click()
            expect(page.locator(".answer")).to_have_text("Yes: no VM runs on it.")
            expect(page.locator("main")).not_to_contain_text("left running")
        assert {each["power"] for each in world.vms().values()} == {"stopped"}


def test_campaign_dialog_says_that_a_host_was_lost_since_the_preview(tmp_path: Path) -> None:
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        world.server.poll(vm="web-0")
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page, dialog = watched.page, watched.page.get_by_role("dialog")
            sign_in(watched, world)
            watched.view("#/campaigns/new")
            page.get_by_label("Hosts", exact=True).fill("host-a")
            page.get_by_role("button", name="Preview the plan").click()
            start = page.get_by_role("button", name="Start the campaign")
            expect(start).to_be_visible()
            daemon.kill()
            eventually(
                lambda: world.server.ask("GET", "/hosts/host-a")[1]["state"],
                lambda state: state == "unreachable",
            )
            start.click()
            expect(dialog).to_contain_text("Nothing can be done on 1 host now")
            dialog.get_by_role("button", name="Start").click()
            expect(dialog).to_contain_text("Started.")


def test_unmovable_vms_are_shown_before_anything_is_announced(tmp_path: Path) -> None:
    """On the page of their host, in its dialog, and in the plan of a campaign that moves VMs."""
    disk = "disk vdb is on a local file system (ext4): /var/a.img"
    device = "PCI device 0000:3b:00.1 of its host is passed through to it"
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            page, dialog = watched.page, watched.page.get_by_role("dialog")
            sign_in(watched, world)
            watched.view("#/hosts/host-a")
            expect(page.locator("dl")).to_contain_text("none known")
            maintain = page.get_by_role("button", name="Maintain")
            maintain.click()
            expect(dialog).to_contain_text("Pauses 2 VMs")
            expect(dialog).not_to_contain_text("cannot move")
            dialog.get_by_role("button", name="Not now").click()

            daemon.list_vms(vm("web-0", 1, unmovable=disk), vm("web-1", 2, unmovable=device))
            lines = page.locator("dl").get_by_role("listitem").filter(has_text=": ")
            for text in (f"web-0: {disk}", f"web-1: {device}"):
                expect(lines.filter(has_text=text)).to_have_text(text)
            assert watched.find_accessibility_problems() == []
            maintain.click()
            expect(dialog).to_contain_text(
                f"A Redeploy fails for 2 VMs that cannot move: web-0: {disk}"
            )
            dialog.get_by_role("button", name="Not now").click()

            watched.view("#/campaigns/new")
            page.get_by_label("Hosts", exact=True).fill("host-a")
            preview = page.get_by_role("button", name="Preview the plan")
            preview.click()  # a Freeze
            expect(page.get_by_role("heading", name="The plan: 1 host")).to_be_visible()
            expect(page.get_by_role("heading", name="VMs that cannot move")).to_have_count(0)
            page.get_by_label("Maintenance").select_option("Redeploy")
            preview.click()
            expect(page.get_by_role("heading", name="VMs that cannot move")).to_be_visible()
            for text in (f"host-a: web-0: {disk}", f"host-a: web-1: {device}"):
                expect(page.get_by_role("listitem").filter(has_text=text)).to_be_visible()
            assert watched.find_accessibility_problems() == []
