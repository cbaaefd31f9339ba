"""Real guests on real hosts: the stories of the product, from the request to the recovered guest.

The stories share a cloud and run in this order; each leaves it as the next one needs it.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import libvirt
import pytest

from forewarn.platform.libvirt import marker
from tests.vm.cloud import EVENT_SECONDS_MAX, Cloud, Watch, cloud_of_two_hosts
from tests.vm.guest import BOOT_SECONDS_MAX, NAME, Guest
from tests.vm.guest_image import GuestImage
from tests.vm.migration import move_by_hand, move_while_it_polls
from tests.vm.real_libvirt import RealHost, wait_for

RUNNING, PAUSED, OFF = (
    libvirt.VIR_DOMAIN_RUNNING,
    libvirt.VIR_DOMAIN_PAUSED,
    libvirt.VIR_DOMAIN_SHUTOFF,
)
SUSPENDED, RESUMED = libvirt.VIR_DOMAIN_EVENT_SUSPENDED, libvirt.VIR_DOMAIN_EVENT_RESUMED


@pytest.fixture(scope="module")
def cloud(image: GuestImage) -> Iterator[Cloud]:
    """Its folder has a short name: the path of a socket may have 107 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="fw-cloud-") as folder,
        cloud_of_two_hosts(Path(folder), image) as cloud,
    ):
        yield cloud


@pytest.fixture
def host_a(cloud: Cloud) -> RealHost:
    return cloud.hosts["host-a"]


@pytest.fixture
def host_b(cloud: Cloud) -> RealHost:
    return cloud.hosts["host-b"]


@pytest.fixture
def web_0(cloud: Cloud) -> Guest:
    return cloud.guests["web-0"]


@pytest.fixture
def web_1(cloud: Cloud) -> Guest:
    return cloud.guests["web-1"]


@pytest.fixture
def db_0(cloud: Cloud) -> Guest:
    return cloud.guests["db-0"]


def test_guests_with_one_address_on_two_hosts_are_themselves(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_0: Guest, web_1: Guest
) -> None:
    assert web_0.address == web_1.address
    assert (web_0.poll(host_a, NAME), web_1.poll(host_b, NAME)) == ("web-0", "web-1")
    vms = {vm["name"]: (vm["host"], vm["scope"]) for vm in cloud.ask("/vms")["vms"]}
    assert vms == {
        "web-0": ("host-a", "web"),
        "web-1": ("host-b", "web"),
        "db-0": ("host-a", "db"),
    }


def test_reboot_is_announced_prepared_approved_done_and_recovered(
    cloud: Cloud, web_0: Guest
) -> None:
    boots = web_0.boots
    (event,) = cloud.schedule("/vms/web-0/restart")
    web_0.wait_for_line(f"prepared Reboot {event['id']}")
    assert web_0.boots == boots
    wait_for(lambda: web_0.boots == boots + 1, EVENT_SECONDS_MAX, cloud.report)
    web_0.wait_for_line(f"recovered Reboot {event['id']}")

    cloud.wait_until_over(event["id"])
    story = [what for what in cloud.changes(event["id"]) if what != "claimed"]
    assert story == ["scheduled", "approved", "started", "restarted", "impacted", "completed"]
    assert web_0.boots == boots + 1


def test_guest_of_another_scope_sees_nothing(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_1: Guest, db_0: Guest
) -> None:
    """The incarnation grows with every visible change, so an unchanged one saw none."""
    assert json.loads(db_0.poll(host_a)) == {"DocumentIncarnation": 1, "Events": []}
    assert json.loads(web_1.poll(host_b))["DocumentIncarnation"] > 1
    assert "prepared" not in db_0.console


def test_freeze_suspends_and_resumes_the_guests_of_a_host(
    cloud: Cloud, host_a: RealHost, web_0: Guest, db_0: Guest
) -> None:
    boots = web_0.boots, db_0.boots
    with lifecycle(host_a) as seen:
        events = cloud.schedule("/hosts/host-a/maintain", type="Freeze", duration_seconds=3)
        assert {event["resources"][0] for event in events} == {"web-0", "db-0"}
        for event in events:
            cloud.wait_until_over(event["id"])
            cloud.guests[event["resources"][0]].wait_for_line(f"recovered Freeze {event['id']}")

    for name in ("web-0", "db-0"):
        assert [what for of, what in seen if of == name] == [SUSPENDED, RESUMED]
    assert (web_0.boots, db_0.boots) == boots


def test_redeploy_migrates_a_guest_live_to_the_other_host(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, db_0: Guest
) -> None:
    """Behind NAT: it goes on sending to the MAC of the router on its old host."""
    event = move_while_it_polls(cloud, db_0, host_a, host_b)

    assert cloud.ask("/vms/db-0")["host"] == "host-b"
    assert (host_a.names(), host_b.state("db-0")) == (["web-0"], RUNNING)
    assert db_0.boots == 1
    assert "restarted" not in cloud.changes(event)


def test_guest_on_a_lan_keeps_its_notice_when_it_moves_and_moves_back(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, db_0: Guest
) -> None:
    """It goes on sending to the MAC of its old host, which has the relay's address too."""
    db_0.run(host_b, USE_LAN)
    move_while_it_polls(cloud, db_0, host_b, host_a)
    move_while_it_polls(cloud, db_0, host_a, host_b)
    db_0.run(host_b, LEAVE_LAN)

    assert db_0.boots == 1


def test_guest_that_is_moved_by_hand_during_a_long_poll_is_answered(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, db_0: Guest
) -> None:
    """Behind NAT, and back on a LAN."""
    move_by_hand(cloud, db_0, host_b, host_a)
    db_0.run(host_a, USE_LAN)
    move_by_hand(cloud, db_0, host_a, host_b)
    db_0.run(host_b, LEAVE_LAN)

    assert db_0.boots == 1


LEAVE_LAN = "ip route del 169.254.169.254 dev eth1"
USE_LAN = """
ip link set eth1 up
ip address replace 192.168.50.20/24 dev eth1
ip route replace 169.254.169.254 dev eth1
"""


def test_guest_with_its_neighbours_address_is_still_itself(
    cloud: Cloud, host_b: RealHost, web_1: Guest, db_0: Guest
) -> None:
    """It also sends the headers by which the daemon names a guest to the server."""
    script = STEAL.format(stolen=web_1.address, id=web_1.id, name=NAME)
    assert db_0.run(host_b, script) == "db-0\n"

    wait_for(lambda: web_1.polls(host_b), BOOT_SECONDS_MAX, cloud.report)


STEAL = """
ip address add {stolen}/24 dev eth0
cat > /tmp/steal.py <<'END'
import http.client, subprocess
for _ in range(50):
    subprocess.run(["arping", "-q", "-U", "-c", "1", "-I", "eth0", "{stolen}"])
    try:
        connection = http.client.HTTPConnection(
            "169.254.169.254", timeout=2, source_address=("{stolen}", 0)
        )
        forged = {{"Metadata": "true", "X-Instance-ID": "{id}", "X-Forewarn-Host": "host-b"}}
        connection.request("GET", "/metadata/{name}", headers=forged)
        print(connection.getresponse().read().decode())
        break
    except OSError:
        pass
END
python3 /tmp/steal.py
ip address del {stolen}/24 dev eth0
"""


def test_campaign_never_has_both_guests_of_a_scope_down(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_0: Guest, web_1: Guest
) -> None:
    with Watch(web_0, host_a) as first, Watch(web_1, host_b) as second:
        campaign = cloud.ask(
            "/campaigns",
            {"type": "Reboot", "hosts": ["host-*"], "max_hosts": 2, "max_unavailable": 1},
        )["campaign"]["id"]
        cloud.wait_for(
            lambda: cloud.ask(f"/campaigns/{campaign}")["state"] == "done", 2 * EVENT_SECONDS_MAX
        )
        first.wait_for_boot()
        second.wait_for_boot()

    assert cloud.ask(f"/campaigns/{campaign}")["hosts"]["done"] == 2
    ((down_0, up_0),), ((down_1, up_1),) = first.outages, second.outages
    assert up_0 - down_0 > 1
    assert up_1 - down_1 > 1
    assert up_0 <= down_1 or up_1 <= down_0


def test_killed_daemon_resumes_what_it_froze(cloud: Cloud, host_a: RealHost, web_0: Guest) -> None:
    (event,) = cloud.schedule("/hosts/host-a/maintain", type="Freeze", duration_seconds=3000)
    wait_for(lambda: host_a.state("web-0") == PAUSED, EVENT_SECONDS_MAX, cloud.report)
    cloud.daemons["host-a"].kill()
    assert host_a.state("web-0") == PAUSED
    cloud.daemons["host-a"].start()

    cloud.wait_until_over(event["id"])
    assert host_a.state("web-0") == RUNNING
    web_0.wait_for_line(f"recovered Freeze {event['id']}")


def test_killed_daemon_reboots_the_guest_after_all(
    cloud: Cloud, host_a: RealHost, web_0: Guest
) -> None:
    """The guest reboots while nobody watches, so nobody knows, and it is rebooted again."""
    boots, presses = web_0.boots, web_0.presses
    web_0.shut_down_slowly(host_a, 5)
    (event,) = cloud.schedule("/vms/web-0/restart")
    wait_for(lambda: web_0.presses == presses + 1, EVENT_SECONDS_MAX, cloud.report)
    assert marker_of(host_a, "web-0").event == event["id"]
    cloud.daemons["host-a"].kill()
    assert (web_0.boots, host_a.state("web-0")) == (boots, RUNNING)
    wait_for(lambda: web_0.boots == boots + 1, BOOT_SECONDS_MAX, cloud.report)
    assert cloud.ask(f"/events/{event['id']}")["status"] == "Started"
    cloud.daemons["host-a"].start()

    cloud.wait_until_over(event["id"])
    assert (web_0.boots, host_a.state("web-0")) == (boots + 2, RUNNING)
    assert marker_of(host_a, "web-0") == marker.Marker()
    web_0.wait_for_line(f"recovered Reboot {event['id']}")


def test_killed_server_does_not_disturb_an_impact(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_0: Guest, db_0: Guest
) -> None:
    """The daemon ends it in time and reports it to the server that starts again."""
    before = db_0.poll(host_b)
    with lifecycle(host_a) as seen:
        (event,) = cloud.schedule("/hosts/host-a/maintain", type="Freeze", duration_seconds=8)
        wait_for(lambda: host_a.state("web-0") == PAUSED, EVENT_SECONDS_MAX, cloud.report)
        cloud.server.kill()
        assert db_0.poll(host_b) == before
        wait_for(lambda: host_a.state("web-0") == RUNNING, EVENT_SECONDS_MAX, cloud.report)
        cloud.server.start()
        cloud.wait_until_over(event["id"])

    assert seen == [("web-0", SUSPENDED), ("web-0", RESUMED)]
    web_0.wait_for_line(f"recovered Freeze {event['id']}")


def test_impacts_of_a_dead_host_wait_and_its_guests_count_as_down(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_0: Guest, web_1: Guest
) -> None:
    boots = web_0.boots, web_1.boots
    cloud.daemons["host-a"].kill()
    host_a.die()
    cloud.wait_for(lambda: cloud.ask("/hosts/host-a")["daemon"]["is_connected"] is False)
    (event,) = cloud.schedule("/vms/web-0/restart")
    cloud.ask(f"/events/{event['id']}/approve", {})
    campaign = cloud.ask(
        "/campaigns", {"type": "Reboot", "hosts": ["host-b"], "max_unavailable": 1}
    )["campaign"]["id"]
    cloud.wait_for(lambda: cloud.ask(f"/campaigns/{campaign}")["waiting_for"])
    assert cloud.ask(f"/campaigns/{campaign}")["hosts"]["waiting"] == 1
    assert cloud.ask(f"/events/{event['id']}")["status"] == "Started"
    cloud.ask(f"/campaigns/{campaign}/cancel", {})

    host_a.boot_again()
    cloud.daemons["host-a"].start()
    cloud.wait_until_over(event["id"])
    web_0.wait_until_up(host_a)
    assert (web_0.boots, web_1.boots) == (boots[0] + 1, boots[1])
    assert "impact-failed" not in cloud.changes(event["id"])


def test_terminate_removes_a_guest_that_was_told(
    cloud: Cloud, host_b: RealHost, web_1: Guest
) -> None:
    (event,) = cloud.schedule("/vms/web-1/delete")
    cloud.wait_until_over(event["id"])

    assert f"prepared Terminate {event['id']}" in web_1.console
    assert host_b.names() == ["db-0"]
    assert [vm["name"] for vm in cloud.ask("/vms")["vms"]] == ["db-0", "web-0"]


def test_drained_guest_with_a_local_disk_stays_as_it_is(
    cloud: Cloud, host_b: RealHost, db_0: Guest
) -> None:
    """It is told, and then nothing happens to it: it cannot move, and is not stopped for that."""
    boots, presses = db_0.boots, db_0.presses
    with db_0.with_local_disk(host_b) as path:
        cloud.wait_for(lambda: cloud.ask("/hosts/host-b")["unmovable"])
        (unmovable,) = cloud.ask("/hosts/host-b")["unmovable"]
        assert (unmovable["vm"], unmovable["why"].endswith(path)) == ("db-0", True)
        (event,) = cloud.schedule("/hosts/host-b/maintain", type="Redeploy")
        cloud.wait_for(lambda: "failed" in cloud.changes(event["id"]), EVENT_SECONDS_MAX)

    assert cloud.changes(event["id"]).count("impact-failed") == 1
    (failure,) = cloud.ask(f"/history?event={event['id']}&what=impact-failed")["history"]
    assert failure["detail"].startswith("db-0 cannot leave host-b: disk vdc is on a local file")
    assert failure["detail"].endswith(path)
    assert (db_0.boots, db_0.presses) == (boots, presses)
    assert (host_b.state("db-0"), cloud.ask("/vms/db-0")["host"]) == (RUNNING, "host-b")


def test_killed_daemon_moves_the_guest_after_all(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, db_0: Guest
) -> None:
    """It is stopped here and started there, as its scope wants; the daemon is killed between."""
    boots, presses = db_0.boots, db_0.presses
    fleet = cloud.ask("/fleet")
    next(s for s in fleet["scopes"] if s["name"] == "db")["policy"] = {"redeploy": "cold"}
    cloud.ask("/fleet", fleet, method="PUT")
    db_0.shut_down_slowly(host_b, 5)
    (event,) = cloud.schedule("/vms/db-0/redeploy")
    wait_for(lambda: db_0.presses == presses + 1, EVENT_SECONDS_MAX, cloud.report)
    cloud.daemons["host-b"].kill()
    wait_for(lambda: host_b.state("db-0") == OFF, BOOT_SECONDS_MAX, cloud.report)
    assert (host_a.state("db-0"), db_0.boots) == (OFF, boots)
    assert cloud.ask("/vms/db-0")["host"] == "host-b"
    cloud.daemons["host-b"].start()

    cloud.wait_until_over(event["id"])
    assert (host_a.state("db-0"), host_b.names(), db_0.boots) == (RUNNING, [], boots + 1)
    assert cloud.ask("/vms/db-0")["host"] == "host-a"
    assert "restarted" in cloud.changes(event["id"])
    db_0.wait_for_line(f"recovered Redeploy {event['id']}")


def test_guest_of_a_dead_host_is_started_elsewhere_by_hand(
    cloud: Cloud, host_a: RealHost, host_b: RealHost, web_0: Guest, db_0: Guest
) -> None:
    """As docs/hostd.md says: fence the host, start its guests elsewhere, forget the host."""
    boots = web_0.boots, db_0.boots
    cloud.daemons["host-a"].kill()
    host_a.die()
    events = {e["resources"][0]: e["id"] for e in cloud.schedule("/hosts/host-a/fail")}
    host_b.run_domain(db_0.xml)

    cloud.wait_until_over(events["db-0"])
    vm = cloud.ask("/vms/db-0")
    assert (vm["host"], vm["power"]) == ("host-b", "running")
    wait_for(lambda: db_0.polls(host_b), BOOT_SECONDS_MAX, cloud.report)
    assert cloud.ask(f"/events/{events['web-0']}")["status"] == "Started"
    cloud.ask(f"/events/{events['web-0']}/complete", {})
    cloud.ask("/hosts/host-a/daemon?fenced=true", method="DELETE")
    assert [host["name"] for host in cloud.ask("/hosts")["hosts"] if host["daemon"]] == ["host-b"]
    assert (web_0.boots, db_0.boots) == (boots[0], boots[1] + 1)


def test_preempt_stops_a_guest_that_was_told(cloud: Cloud, host_b: RealHost, db_0: Guest) -> None:
    """More than the minimum notice: the agent was refused while its host was not known, and waits
    before it polls again. When it is ready it approves.
    """
    later = datetime.now(UTC) + timedelta(seconds=EVENT_SECONDS_MAX)
    (event,) = cloud.schedule("/vms/db-0/evict", not_before=later.isoformat())
    cloud.wait_until_over(event["id"])

    assert f"prepared Preempt {event['id']}" in db_0.console
    assert host_b.state("db-0") == OFF
    assert cloud.ask("/vms/db-0")["power"] == "deallocated"


def marker_of(host: RealHost, name: str) -> marker.Marker:
    return marker.read(host.connection.lookupByName(name))


@contextmanager
def lifecycle(host: RealHost) -> Iterator[list[tuple[str, int]]]:
    """What libvirt tells of the guests of a host within this."""
    seen: list[tuple[str, int]] = []
    number = host.connection.domainEventRegisterAny(
        None,
        libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE,
        lambda connection, domain, event, *_: seen.append((domain.name(), event)),
        None,
    )
    yield seen
    host.connection.domainEventDeregisterAny(number)
