"""An endpoint that says what it is told to, whatever it is asked: for looking at how answers are
read.
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forewarn.conformance.raw_http import Endpoint, Time
from forewarn.conformance.session import Stage

TIME = Time(time.monotonic, lambda seconds: None)


@contextmanager
def saying(*answers: bytes) -> Iterator[Endpoint]:
    """One answer for each connection, in turn; then the connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
        thread.join(10)


def stage(endpoint: Endpoint, *names: str) -> Stage:
    """One that only reads."""
    return Stage(endpoint, names=names, control=None, may_approve=False, time=TIME)
