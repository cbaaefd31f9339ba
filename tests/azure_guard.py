"""No test contacts Azure's address outside a network of its own: on a cloud machine it answers.

Python reports each connection before it is made. Not those of uvloop, which libuv makes. A thread
that has entered a network namespace has a network of its own.
"""

import os
import sys
from pathlib import Path

AZURE = "169.254.169.254"
NAMESPACE = "/proc/thread-self/ns/net"
"""Linux only. Elsewhere there are no namespaces, and every connection is refused."""


def read_namespace() -> str:
    return os.readlink(NAMESPACE) if Path(NAMESPACE).exists() else ""


MACHINE = read_namespace()


def refuse_azure(event: str, arguments: tuple[object, ...]) -> None:
    if event != "socket.connect" or not isinstance(arguments[1], tuple):
        return
    if arguments[1][0] == AZURE and read_namespace() == MACHINE:
        raise AssertionError(f"a test would have contacted {AZURE}")


sys.addaudithook(refuse_azure)
