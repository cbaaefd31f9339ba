"""An endpoint that sends prepared responses, whatever the request."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forewarn.client.http1 import Endpoint
from forewarn.conformance.raw_http import SessionClock
from forewarn.conformance.session import Session

CLOCK = SessionClock(time.monotonic, lambda seconds: None)


@contextmanager
def serving(*responses: bytes) -> Iterator[Endpoint]:
    """One response for each connection, in order; then the connection is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for response in responses:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(response)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint("127.0.0.1", listener.getsockname()[1], "")
        thread.join(10)


def reading_session(endpoint: Endpoint, *names: str) -> Session:
    """One that may not approve and has no control API."""
    return Session(endpoint=endpoint, names=names, control_api=None, may_approve=False, clock=CLOCK)
