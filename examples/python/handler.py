"""A worker that gets out of the way in time: it watches the Scheduled Events of its VM, drains, and
only then says "go ahead".

Standard library only, as any program inside a VM may be. `python handler.py` runs it on a real VM,
here or on Azure.
"""

import json
import os
import time
import urllib.request
from http.client import HTTPException

ENDPOINT = "http://169.254.169.254"
PATH = "/metadata/scheduledevents?api-version=2020-07-01"
OPENER = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # the endpoint is here: no proxy knows it


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
    """Keeps a worker out of the way of what happens to its VM.

    `look` is to be called once in `period_seconds`.
    """

    period_seconds = 1

    def __init__(self, worker: Worker, name: str, endpoint: str = ENDPOINT) -> None:
        self.worker = worker
        self.name = name
        self.url = endpoint + PATH

    def look(self) -> None:
        """One look at what is to come, and what follows from it."""
        try:
            ours = [event for event in self.events() if self.concerns_us(event)]
            self.worker.is_open = not ours
            for event in ours:
                if event["EventStatus"] == "Scheduled" and self.is_ready():
                    self.approve(event)
        except (
            OSError,
            HTTPException,
            ValueError,
            KeyError,
        ) as problem:  # nothing follows from that: the next look may succeed
            print(f"no sense to be had of the endpoint: {problem!r}")

    def events(self) -> list[dict[str, str]]:
        events: list[dict[str, str]] = json.loads(ask(self.url))["Events"]
        return events

    def concerns_us(self, event: dict[str, str]) -> bool:
        """All VMs of an availability set see one document; what counts is whether our name is in
        it.
        """
        return self.name in event["Resources"]

    def is_ready(self) -> bool:
        return self.worker.is_drained

    def approve(self, event: dict[str, str]) -> None:
        body = json.dumps({"StartRequests": [{"EventId": event["EventId"]}]}).encode()
        ask(self.url, body)
        print(f"approved {event['EventType']} {event['EventId']}")


def ask(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, data=body, headers={"Metadata": "true"})
    with OPENER.open(request, timeout=10) as answer:
        return str(answer.read().decode())


def own_name(endpoint: str = ENDPOINT) -> str:
    """The name that `Resources` have for this VM. It is not the hostname."""
    return ask(endpoint + "/metadata/instance/compute/name?api-version=2021-02-01&format=text")


if __name__ == "__main__":
    endpoint = os.environ.get("FOREWARN_ENDPOINT", ENDPOINT)  # `forewarn lab run` sets it
    handler = Handler(Worker(), own_name(endpoint), endpoint)
    while True:  # ends when it is stopped
        handler.look()
        time.sleep(handler.period_seconds)
