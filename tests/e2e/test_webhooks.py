"""Webhooks of a real service: signed, in order, at least once, whoever dies in between."""

import base64
import hashlib
import hmac
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.service import Service, running
from tests.e2e.webhook_receiver import WebhookReceiver

SECRET = b"a secret of more than twenty-four bytes"


@contextmanager
def telling(folder: Path, *urls: str, more: tuple[str, ...] = ()) -> Iterator[Service]:
    (folder / "secret").write_bytes(SECRET + b"\n")
    hooks = [flag for url in urls for flag in ("--webhook", url)]
    limits = (
        "--webhook-secret-file",
        "secret",
        "--webhook-seconds-max",
        "0.5",
        "--simulate-duration",
        "Reboot=10ms",
    )
    with running(folder, *hooks, *limits, *more) as service:
        yield service


def restart(service: Service) -> int:
    """Something that happens: nobody polls, so it is done at once.

    Two changes are told of it: executed-silently, completed.
    """
    return service.ask("POST", "/vms/web-0/restart")[0]


def settled(service: Service) -> list[int]:
    """The numbers of all chosen changes in the history, the oldest first, when nothing is under way
    any more.
    """
    chosen = ("executed-silently", "completed")
    end = time.monotonic() + 30
    while True:  # ends at the deadline
        found = [
            one
            for one in service.ask("GET", "/history?limit=1000")[1]["history"]
            if one["what"] in chosen
        ]
        if found and found[0]["what"] == "completed":
            return [one["number"] for one in reversed(found)]
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_webhook_sends_signed_cloudevents(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver, telling(tmp_path, receiver.url) as service:
        assert restart(service) == 202
        receiver.wait_for(2)
        headers, body = receiver.requests[0]
        event = receiver.events[0]

        assert [one["type"] for one in receiver.events] == [
            "forewarn.event.executed-silently",
            "forewarn.event.completed",
        ]
        assert headers["content-type"] == "application/cloudevents+json; charset=utf-8"
        assert (event["specversion"], event["id"], event["subject"]) == (
            "1.0",
            headers["webhook-id"],
            event["data"]["event"],
        )
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.digest(SECRET, signed, hashlib.sha256)).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60
        assert service.stop() == 0
        log = (tmp_path / "log.txt").read_text()
        assert "hidden" not in log
        assert SECRET.decode() not in log


def test_webhook_survives_kills_in_order(tmp_path: Path) -> None:
    """As a power cut would end it: what was acknowledged to the operator is told, some of it twice,
    none of it too late.
    """
    with (
        WebhookReceiver() as receiver,
        # a limit no busy machine exceeds: each failure would double the pause before the next try
        telling(tmp_path, receiver.url, more=("--webhook-seconds-max", "30")) as service,
    ):
        for turn in range(4):
            for _ in range(3):
                assert restart(service) in (202, 409)  # the last one may still be under way
                time.sleep(0.02 * turn)
            service.kill()
            service.start()
        for _ in range(100):
            if restart(service) == 202:
                break
            time.sleep(0.1)
        expected = settled(service)
        end = time.monotonic() + 60
        while set(receiver.numbers()) != set(expected) and time.monotonic() < end:
            time.sleep(0.1)

        result = receiver.numbers()
        assert sorted(set(result)) == expected
        firsts = list(dict.fromkeys(result))
        assert firsts == sorted(firsts)


def test_hanging_receiver_times_out_and_delays_no_other(tmp_path: Path) -> None:
    with (
        WebhookReceiver() as good,
        WebhookReceiver() as bad,
        telling(tmp_path, bad.url, good.url) as service,
    ):
        bad.is_hanging = True
        began = time.monotonic()
        restart(service)
        good.wait_for(2, seconds_max=10)
        assert time.monotonic() - began < 5
        bad.is_hanging = False
        bad.wait_for(2, seconds_max=30)

        assert bad.numbers()[0] == good.numbers()[0]
        assert service.stop() == 0


def test_webhook_delivers_what_was_missed_during_an_outage(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver, telling(tmp_path, receiver.url) as service:
        receiver.status = 500
        restart(service)
        expected = settled(service)
        service.stop()
        receiver.status = 200
        service.start()
        receiver.wait_for(2, seconds_max=30)

        assert receiver.numbers() == expected


def test_event_grid_subject_is_the_path_that_approves(tmp_path: Path) -> None:
    """A function written for Azure takes the subject of the notification to acknowledge it."""
    more = ("--webhook-format", "event-grid")
    with WebhookReceiver() as receiver, telling(tmp_path, receiver.url, more=more) as service:
        service.ask("POST", "/hosts/host-b/maintain", {"type": "Reboot"})
        receiver.wait_for(1)
        (scheduled,) = receiver.events[0]
        approve = f"{scheduled['subject']}/acknowledge?api-version=2023-10-01-preview"
        request = urllib.request.Request(f"{service.control}{approve}", b"", method="POST")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as response:
            assert response.read() == b'{"value":"Successfully Approved"}'
        receiver.wait_for(3)

        events = [event for (event,) in receiver.events]
        seen = [event["data"]["resourceInfo"]["properties"]["EventStatus"] for event in events]
        assert seen == ["Scheduled", "Started", "Completed"]
        assert len({event["id"] for event in events}) == 3
        assert {event["subject"] for event in events} == {scheduled["subject"]}


def test_two_servers_deliver_each_change_once(tmp_path: Path) -> None:
    with WebhookReceiver() as receiver, telling(tmp_path, receiver.url) as one:
        two = Service(tmp_path, *one.flags).start()
        try:
            for service in (one, two, one, two):
                for _ in range(100):
                    if restart(service) == 202:
                        break
                    time.sleep(0.05)
            expected = settled(one)
            receiver.wait_for(len(expected))
            time.sleep(1)
            assert receiver.numbers() == expected
        finally:
            two.kill()


@pytest.mark.system
def test_untrusted_receiver_certificate_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that the system's authorities, or the file in SSL_CERT_FILE, vouch for is."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    names = [
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*make, *names], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with WebhookReceiver(tls) as receiver, telling(tmp_path, receiver.url) as service:
        restart(service)
        settled(service)
        end = time.monotonic() + 30
        while "webhook failed" not in (tmp_path / "log.txt").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert receiver.requests == []
        service.stop()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        service.start()
        receiver.wait_for(2)
