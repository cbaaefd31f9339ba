"""What a hostile host costs the polls of others. `python -m tests.bench.report_load`; exits 1
where the limit is exceeded.

A real `forewarn serve` runs on one core. From the other core a VM polls at a steady pace while a
host with a token reports 2,000 other VMs each time, as fast as it can. Rounds with and without it
take turns.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

from forewarn.platform.remote import VMS_MAX
from tests.bench.attack import served
from tests.bench.load import LOAD_CORE
from tests.bench.rounds import PROCESS_SECONDS_MAX, Result, observe_service, take_rounds
from tests.e2e.service import Service, call

HOST = "hostile"


def report(control: str, token: str) -> None:
    """Report other VMs each time, until it is ended; then print how often it got which answer."""
    answers = Counter[str]()

    def end(*_: object) -> None:
        print(json.dumps(answers), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    signal.alarm(PROCESS_SECONDS_MAX)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    print("ready", flush=True)
    # Each round continues after the numbers of the one before: a lower one is refused.
    for number in count(int(time.time()) % 10_000 * 90):  # ends with the process
        vms = [
            {"name": f"vm-{number}-{each}", "id": f"00000000-0000-4000-8000-{number:06}{each:06}"}
            for each in range(VMS_MAX)
        ]
        request = {
            "session": "s1",
            "machine": "m1",
            "number": number,
            "inventory": {"vms": vms},
        }
        url = f"{control}/api/v1/hosts/{HOST}/work"
        status, body = call("POST", url, json.dumps(request).encode(), headers=headers)
        is_merged = status == 200 and json.loads(body)["is_merged"]
        answers["merged" if is_merged else f"status {status}, not merged"] += 1


def create_token(service: Service) -> str:
    """That of the hostile host. The first token of a service is an admin's."""
    for new in ({"name": "admin", "role": "admin"}, {"name": HOST, "role": "host", "host": HOST}):
        status, created = service.ask("POST", "/tokens", new)
        assert status == 201, created
        service.token = created["text"]
    return service.token


def measure() -> Result:
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as service:
        token = create_token(service)
        name = f"one host, {VMS_MAX:,} other VMs each time"
        command = (sys.executable, "-m", "tests.bench.report_load", service.control, token)
        return take_rounds(name, lambda: observe_service(service), *command)


def main() -> int:
    result = measure()
    print(*result.lines(), sep="\n")
    return 0 if result.is_met else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report(*sys.argv[1:])
    else:
        os.sched_setaffinity(0, {int(LOAD_CORE)})
        sys.exit(main())
