"""An event and the occasion of a step, scripts that stand in for commands, and a web server that
answers as it is told.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forewarn.agent.step import Occasion, Phase
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


def occasion(
    phase: str = "prepare", *, seconds: float = 20, event: Event | None = None, stop: bool = False
) -> Occasion:
    made = Occasion(event or reboot(), Phase(phase), "web-0", deadline=0)
    if stop:
        made.stop.set()
    return Occasion(made.event, made.phase, made.name, made.now() + seconds, made.stop)


def occasion_until(path: Path) -> Occasion:
    """Time stands still until the file has something in it (or for a minute); then the limit has
    come.
    """
    end = time.monotonic() + 60

    def now() -> float:
        return 99 if (path.exists() and path.read_text()) or time.monotonic() > end else 0

    return Occasion(reboot(), Phase.PREPARE, "web-0", deadline=50, now=now)


def script(path: Path, *lines: str) -> str:
    """An executable of the shell."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


class Server:
    """Answers with these statuses, one after the other and the last for ever, and keeps what it was
    asked.
    """

    SILENT = 0
    """Instead of a status: no answer until the server ends."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = ""
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator["Server"]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.command, self.path, dict(self.headers.items()), body))
                status = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                if status == Server.SILENT:
                    outer._is_over.wait()
                    return
                said = f"answer {status}".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(said)))
                self.send_header("Location", f"{outer.url}/elsewhere")
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST = do_PUT = answer

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
