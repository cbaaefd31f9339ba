"""Thousands of clients that wait for one change: what they cost while they wait, how soon all of
them know, and how long another VM's poll takes meanwhile.
"""

import resource
import select
import socket
import time
from typing import NamedTuple

from tests.bench.load import QUERY, Server

WAITERS_MAX = 20_000
DESCRIPTORS_RESERVED = 100
SOURCES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
"""The VMs that wait: one address has too few ports for everybody, and for the next run."""
ANSWERED_SECONDS_MAX = 30.0
ANSWERS_MAX = 64
"""Answers that are read before the next look at the other VM's connection."""
EVENTS = f"/metadata/scheduledevents?{QUERY} HTTP/1.1\r\nHost: h\r\nMetadata: true\r\n"
REQUEST = f'GET {EVENTS}If-None-Match: "1"\r\nPrefer: wait=600\r\n\r\n'.encode()
POLL = f"GET /as/vm-0{EVENTS}\r\n".encode()


class Waited(NamedTuple):
    """`poll_milliseconds`: the slowest poll of another VM while the others were answered."""

    clients: int
    bytes_each: float
    first_milliseconds: float
    last_milliseconds: float
    poll_milliseconds: float


def measure(server: Server) -> Waited:
    """Each client is a file descriptor, here and in the server."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(WAITERS_MAX, descriptors - DESCRIPTORS_RESERVED)
    before = server.memory()["rss"]
    address = ("127.0.0.1", server.target.port)
    clients = [
        socket.create_connection(address, source_address=(SOURCES[number % len(SOURCES)], 0))
        for number in range(count)
    ]
    other = socket.create_connection(address)
    try:
        for client in clients:
            client.sendall(REQUEST)
        while (status := server.memory())["waiting"] < count:  # ends: all of them wait
            time.sleep(0.1)
        delays, polls = answered(server, clients, other)
    finally:
        for client in [*clients, other]:
            client.close()
    return Waited(
        count,
        (status["rss"] - before) / count,
        min(delays) * 1000,
        max(delays) * 1000,
        max(polls) * 1000,
    )


def answered(
    server: Server, clients: list[socket.socket], other: socket.socket
) -> tuple[list[float], list[float]]:
    """When each client got its answer, which must be the new document, and how long polls of the
    other took.
    """
    waiting = {client.fileno(): client for client in clients}
    with select.epoll() as woken, select.epoll() as polled:
        polled.register(other, select.EPOLLIN)
        for number in waiting:
            woken.register(number, select.EPOLLIN)
        delays: list[float] = []
        polls: list[float] = []
        began = time.perf_counter()
        server.change()
        sent = time.perf_counter()
        other.sendall(POLL)
        while waiting:  # ends when all have been answered, or with an error
            ready = woken.poll(ANSWERED_SECONDS_MAX, ANSWERS_MAX)
            if not ready:
                raise RuntimeError(f"{len(waiting)} of {len(clients)} clients were not answered")
            for number, _ in ready:
                response = waiting.pop(number).recv(4096)
                woken.unregister(number)
                delays.append(time.perf_counter() - began)
                if b'etag: "2"' not in response:
                    raise RuntimeError(f"a client was answered {response!r}")
            if polled.poll(0):
                polls.append(time.perf_counter() - sent)
                other.recv(4096)
                sent = time.perf_counter()
                other.sendall(POLL)
        polled.poll(ANSWERED_SECONDS_MAX)
        polls.append(time.perf_counter() - sent)
    return delays, polls
