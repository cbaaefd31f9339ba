"""Problems of hosts and VMs, in the console and on the command line: nothing looks healthy."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.cli_service import forewarn
from tests.e2e.console_page import ConsolePage, console
from tests.e2e.host_daemon import HostWorld, daemon_of, hosting, vm
from tests.e2e.waiting import eventually

pytestmark = pytest.mark.system
AWAY = "its daemon has been away since"
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


def test_event_that_is_due_and_does_not_start_says_that_its_vm_cannot_read_it(
    tmp_path: Path,
) -> None:
    with hosting(tmp_path) as world, daemon_of(world, *EXEC) as daemon:
        world.wait_for_vms("web-0", "web-1")
        world.server.poll(vm="web-0")
        daemon.kill()
        eventually(lambda: "its daemon has been away" in ask(world, "host", "show", "host-a"))
        said = ask(world, "vm", "evict", "web-0")
        assert (
            "\nthe impact waits for the daemon of host-a: its daemon has been away since 20" in said
        )
        (event,) = world.server.ask("GET", "/events")[1]["events"]
        with console(world.server.control) as watched:
            watched.allowed.append("the server responded with a status of 401")
            sign_in(watched, world)
            watched.view(f"#/events/{event['id']}")
            expect(watched.page.locator("main")).to_contain_text(
                "its VMs have not been able to read it since", timeout=90_000
            )
            assert watched.find_accessibility_problems() == []
        shown = ask(world, "event", "show", event["id"])
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
            watched.view("#/vms/web-0")
            expect(page.locator("main")).to_contain_text("unknown")
        assert {each["power"] for each in world.vms().values()} == {"unknown"}


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
