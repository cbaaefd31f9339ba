"""An event and the context of a step, scripts as fake commands, and a scripted web server."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forewarn.agent.steps.base import StepContext, WorkflowPhase
from forewarn.client import Event

NOON = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)


def reboot(**more: Any) -> Event:
    facts: dict[str, Any] = {
        "id": "E1",
        "type": "Reboot",
        "status": "Scheduled",
        "source": "Platform",
        "resources": ("web-0", "web-1"),
        "not_before": NOON,
        "duration_seconds": 9,
        "description": "Host is being maintained",
    }
    return Event(**{**facts, **more})


def context(
    phase: str = "prepare",
    *,
    seconds: float = 20,
    event: Event | None = None,
    stop: bool = False,
    is_simulated: bool = False,
) -> StepContext:
    """With `is_simulated`, sleeping takes no time but moves the clock."""
    stopping = threading.Event()
    if stop:
        stopping.set()
    made = StepContext(event or reboot(), WorkflowPhase(phase), "web-0", 0, stopping)
    if not is_simulated:
        return replace(made, deadline=made.now() + seconds)
    elapsed = [0.0]

    def sleep(duration: float) -> None:
        elapsed[0] += duration

    return replace(made, deadline=seconds, now=lambda: elapsed[0], sleep=sleep)


def context_until(path: Path, *, seconds: float = 50, jump_seconds: float = 99) -> StepContext:
    """Time stands still until the file has content, and then has jumped."""
    end = time.monotonic() + 60

    def now() -> float:
        has_content = path.exists() and path.read_text()
        return jump_seconds if has_content or time.monotonic() > end else 0

    return StepContext(reboot(), WorkflowPhase.PREPARE, "web-0", deadline=seconds, now=now)


def script(path: Path, *lines: str) -> str:
    """An executable shell script."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


class Server:
    """Responds with these statuses in order, repeats the last, and records the requests."""

    SILENT = 0
    """Instead of a status: no response until the server ends."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = ""
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator["Server"]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = dict(self.headers.items())
                outer.requests.append((self.command, self.path, headers, content))
                status = outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0]
                if status == Server.SILENT:
                    outer._is_over.wait()
                    return
                body = f"status {status}".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", f"{outer.url}/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = respond

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield self
            finally:
                self._is_over.set()
                server.shutdown()
                thread.join()
