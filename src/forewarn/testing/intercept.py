"""Routes this process's connections to Azure's address to a listener of the lab.

For code in which http://169.254.169.254 is built in. Almost every Python client connects through
`socket.socket`; the event loops that do not are listed below. Other processes are not affected.
"""

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from forewarn.errors import Refused

ADDRESS = ("169.254.169.254", 80)
METHODS = ("connect", "connect_ex", "sock_connect", "create_connection")

_intercepting = threading.Lock()


@contextmanager
def intercept(port: int) -> Iterator[None]:
    """Route connections of all threads to 127.0.0.1:`port` until the end of the block.

    Refused inside another intercept: there is one address, so there can be one VM.
    """
    if not _intercepting.acquire(blocking=False):
        raise Refused(
            f"connections to {ADDRESS[0]} are intercepted already; expected one intercept at a time"
        )
    try:
        with ExitStack() as stack:
            for owner in _owners():
                for name in METHODS:
                    if hasattr(owner, name):
                        _route(stack, owner, name, ("127.0.0.1", port))
            yield
    finally:
        _intercepting.release()


def _owners() -> list[type[Any]]:
    """The loop of Windows passes handles to the system, and uvloop addresses to libuv."""
    owners: list[type[Any]] = [socket.socket]
    if hasattr(asyncio, "ProactorEventLoop"):
        owners.append(asyncio.ProactorEventLoop)
    if importlib.util.find_spec("uvloop"):
        import uvloop

        owners.append(uvloop.Loop)
    return owners


def _route(stack: ExitStack, owner: type[Any], name: str, target: tuple[str, int]) -> None:
    """Replace a method by one that replaces the address in its arguments."""
    original: Callable[..., Any] = getattr(owner, name)

    def routed(self: Any, *arguments: Any, **options: Any) -> Any:
        given = [target if each == ADDRESS else each for each in arguments]
        if tuple(given[1:3]) == ADDRESS:  # create_connection(factory, host, port)
            given[1:3] = target
        if (options.get("host"), options.get("port")) == ADDRESS:
            options |= {"host": target[0], "port": target[1]}
        return original(self, *given, **options)

    if name in vars(owner):
        stack.callback(setattr, owner, name, original)
    else:  # inherited
        stack.callback(delattr, owner, name)
    setattr(owner, name, routed)
