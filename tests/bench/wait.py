"""Thousands of clients that wait for one change: what they cost while they wait, and how soon all
of them know.
"""

import select
import socket
import time
from typing import NamedTuple

from tests.bench.load import QUERY, Server

WAITERS = 5000
ANSWERED_SECONDS_MAX = 30.0
REQUEST = (
    f"GET /metadata/scheduledevents?{QUERY} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n"
    'If-None-Match: "1"\r\nPrefer: wait=600\r\n\r\n'
).encode()


class Waited(NamedTuple):
    bytes_each: float
    first_milliseconds: float
    last_milliseconds: float


def measure(server: Server) -> Waited:
    before = server.memory()["rss"]
    clients = [socket.create_connection(("127.0.0.1", server.target.port)) for _ in range(WAITERS)]
    try:
        for client in clients:
            client.sendall(REQUEST)
        while (status := server.memory())["waiting"] < WAITERS:  # ends: all of them wait
            time.sleep(0.1)
        began = time.perf_counter()
        server.change()
        delays = answered(clients, began)
    finally:
        for client in clients:
            client.close()
    return Waited((status["rss"] - before) / WAITERS, min(delays) * 1000, max(delays) * 1000)


def answered(clients: list[socket.socket], began: float) -> list[float]:
    """When each client got its answer, which must be the new document."""
    waiting = {client.fileno(): client for client in clients}
    poll = select.epoll()
    for number in waiting:
        poll.register(number, select.EPOLLIN)
    delays = []
    while waiting:  # ends when all have been answered, or with an error
        ready = poll.poll(ANSWERED_SECONDS_MAX)
        if not ready:
            raise RuntimeError(f"{len(waiting)} of {WAITERS} clients were not answered")
        for number, _ in ready:
            response = waiting.pop(number).recv(4096)
            poll.unregister(number)
            delays.append(time.perf_counter() - began)
            if b'etag: "2"' not in response:
                raise RuntimeError(f"a client was answered {response!r}")
    poll.close()
    return delays
