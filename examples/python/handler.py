"""A worker that polls the Scheduled Events of its VM, drains, and then approves.

Standard library only. `python handler.py` runs it on a real VM,
here or on Azure.
"""

import json
import os
import time
import urllib.request
from http.client import HTTPException

ENDPOINT = "http://169.254.169.254"
PATH = "/metadata/scheduledevents?api-version=2020-07-01"
# The endpoint is link-local, so no proxy can reach it.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Worker:
    """The application: it takes jobs, one at a time, while it is open."""

    def __init__(self) -> None:
        self.is_open = True
        self.job = ""

    def take(self, job: str) -> None:
        if self.is_open:
            self.job = job

    def finish(self) -> None:
        self.job = ""

    @property
    def is_drained(self) -> bool:
        return not self.is_open and not self.job


class Handler:
    """Drains a worker before an event of its VM. Call `poll` every `period_seconds`."""

    period_seconds = 1

    def __init__(self, worker: Worker, name: str, endpoint: str = ENDPOINT) -> None:
        self.worker = worker
        self.name = name
        self.url = endpoint + PATH

    def poll(self) -> None:
        """Poll once and react. An invalid response changes nothing; the next poll may succeed."""
        try:
            ours = [event for event in self.events() if self.concerns_us(event)]
            self.worker.is_open = not ours
            for event in ours:
                if event["EventStatus"] == "Scheduled" and self.is_ready():
                    self.approve(event)
        except (OSError, HTTPException, ValueError, KeyError) as error:
            print(f"poll failed: {error!r}")

    def events(self) -> list[dict[str, str]]:
        events: list[dict[str, str]] = json.loads(send(self.url))["Events"]
        return events

    def concerns_us(self, event: dict[str, str]) -> bool:
        """All VMs of an availability set see one document; only events that name this VM count."""
        return self.name in event["Resources"]

    def is_ready(self) -> bool:
        return self.worker.is_drained

    def approve(self, event: dict[str, str]) -> None:
        body = json.dumps({"StartRequests": [{"EventId": event["EventId"]}]}).encode()
        send(self.url, body)
        print(f"approved {event['EventType']} {event['EventId']}")


def send(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, data=body, headers={"Metadata": "true"})
    with OPENER.open(request, timeout=10) as response:
        return str(response.read().decode())


def own_name(endpoint: str = ENDPOINT) -> str:
    """The name of this VM in `Resources`, not the hostname."""
    return send(endpoint + "/metadata/instance/compute/name?api-version=2021-02-01&format=text")


if __name__ == "__main__":
    endpoint = os.environ.get("FOREWARN_ENDPOINT", ENDPOINT)  # `forewarn lab run` sets it
    handler = Handler(Worker(), own_name(endpoint), endpoint)
    while True:  # until the process is stopped
        handler.poll()
        time.sleep(handler.period_seconds)
