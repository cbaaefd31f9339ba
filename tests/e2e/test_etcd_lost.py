"""Two servers on a real etcd that goes away and comes back, and one whose clock is off."""

import asyncio
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from aetcd import rpc

from forewarn.core.command import Seen
from forewarn.core.timing import Timing
from forewarn.engine.clock import RealClock
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.operations import Operations
from forewarn.engine.readability import Readability
from forewarn.engine.worker import Worker
from forewarn.errors import StoreLost, Unavailable
from forewarn.platform.base import ImpactRequest, ImpactResult
from forewarn.store.etcd_client import EtcdEndpoint
from forewarn.store.open import open_store
from tests.builders import guid
from tests.etcd_cluster import EtcdCluster, Member
from tests.unit.engine.test_engine import FLEET

pytestmark = pytest.mark.system

WAIT_SECONDS_MAX = 40
RESPONSE_SECONDS_MAX = 10
QUORUM_LOST_SECONDS = 20
ATTEMPTS_MAX = 3


class Server:
    """A server at work on the cluster. Its clock is some seconds ahead."""

    def __init__(self, url: str, name: str, ahead_seconds: float = 0) -> None:
        self._url, self._name = url, name
        self._clock = RealClock(wall=lambda: time.time() + ahead_seconds)
        self.began: list[str] = []

    async def __aenter__(self) -> "Server":
        self.engine = Engine(await open_store(self._url), self._clock, Timing())
        contacts = HostContacts(self.engine, ManagedHosts(self.engine))
        await self.engine.load()
        self.operations = Operations(self.engine, lambda: guid(1))
        worker = Worker(
            self.engine,
            self,
            worker=self._name,
            impact_limit=timedelta(hours=1),
            readability=Readability(self.engine, contacts),
        )
        self._task = asyncio.create_task(worker.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.close()

    async def run_impact(self, order: ImpactRequest) -> ImpactResult:
        self.began.append(order.event_id)
        return ImpactResult()


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while not condition():
            await asyncio.sleep(0.01)


def has_lease(server: Server) -> bool:
    return server.engine.server_lease is not None and server.engine.can_serve


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_servers_continue_after_etcd_was_out_of_reach(tmp_path: Path, how: signal.Signals) -> None:
    """A dead etcd refuses connections; a stopped one answers nothing, which is slower."""
    cluster = EtcdCluster(tmp_path)

    async def main() -> None:
        async with Server(cluster.url(), "one") as one, Server(cluster.url(), "two") as two:
            await one.operations.apply(FLEET, by="ann")
            await one.engine.submit("web", Seen(), by="poll")
            await wait_until(lambda: "web" in two.engine.board.scopes)
            (member,) = cluster.members
            member.signal(how)
            await wait_until(lambda: one.engine.stale_since and two.engine.stale_since)
            began = time.monotonic()
            with pytest.raises(StoreLost):
                await one.operations.restart("web-0", by="ann")
            with pytest.raises(Unavailable):
                await two.operations.event(guid(9))
            assert time.monotonic() - began <= RESPONSE_SECONDS_MAX
            assert not one.engine.is_ready
            assert "web-0" in one.engine.board.vms

            if how is signal.SIGKILL:
                member.kill()
                cluster.launch(member)
            else:
                member.signal(signal.SIGCONT)
            # Until it has a lease again, a server announces nothing: 503.
            await wait_until(lambda: has_lease(one) and has_lease(two))
            outcome = await one.operations.restart("web-0", by="ann")
            assert outcome is not None
            await two.operations.approve(guid(1), by="ann")
            await wait_until(lambda: one.began + two.began)
            await wait_until(lambda: not one.engine.board.events and not two.engine.board.events)
            assert one.began + two.began == [guid(1)]

    cluster.start()
    try:
        asyncio.run(main())
    finally:
        cluster.stop()


def test_server_on_etcd_whose_clock_is_off_starts_nothing(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path)

    async def main() -> None:
        url = cluster.url()
        async with (
            Server(url, "one") as one,
            Server(url, "two") as two,
            Server(url, "off", ahead_seconds=3600) as off,
        ):
            await wait_until(lambda: off.engine.is_clock_off)
            assert 3599 < off.engine.clock_skew_seconds < 3605
            assert not one.engine.is_clock_off
            await off.operations.apply(FLEET, by="ann")
            await off.operations.fail("host-b", by="ann")
            await wait_until(lambda: one.began + two.began)
            assert off.began == []

    cluster.start()
    try:
        asyncio.run(main())
    finally:
        cluster.stop()


async def find_leader(cluster: EtcdCluster) -> Member:
    for member in cluster.members:
        endpoint = EtcdEndpoint(member.client, None)
        status = await endpoint.methods[rpc.StatusRequest](rpc.StatusRequest(), timeout=5)
        await endpoint.channel.close()
        if status.leader == status.header.member_id:
            return member
    raise AssertionError("no member of etcd leads")


def test_announcement_that_etcd_commits_after_an_outage_has_all_its_notice(tmp_path: Path) -> None:
    """The operator got an error; the leader had it in its log, and gets its quorum back."""
    cluster = EtcdCluster(tmp_path, size=3)

    async def announce(prefix: str) -> bool:
        """Whether the announcement was committed late. Then it must have all its notice."""
        leader = await find_leader(cluster)
        async with Server(f"etcd://{leader.client}/{prefix}", prefix) as server:
            await wait_until(lambda: has_lease(server))
            await server.operations.apply(FLEET, by="ann")
            await server.engine.submit("web", Seen(), by="poll")
            followers = [member for member in cluster.members if member is not leader]
            for member in followers:
                member.signal(signal.SIGSTOP)
            try:
                with pytest.raises(StoreLost):
                    await server.operations.restart("web-0", by="ann")
                await asyncio.sleep(QUORUM_LOST_SECONDS)
            finally:
                for member in followers:
                    member.signal(signal.SIGCONT)
            try:
                await wait_until(lambda: server.engine.board.events)
            except TimeoutError:
                return False
            await wait_until(lambda: all_notice(server))
            return True

    def all_notice(server: Server) -> bool:
        """NotBefore is at most as many seconds too early as gaps may have that do not count."""
        (event,) = server.engine.board.scopes["web"].scope.events
        left = event.not_before - server.engine.clock.now()
        return left >= Timing().notice[event.type] - timedelta(seconds=5)

    async def main() -> None:
        for number in range(ATTEMPTS_MAX):
            if await announce(f"p{number}"):
                return
        raise AssertionError("no announcement was committed late")

    cluster.start()
    try:
        asyncio.run(main())
    finally:
        for member in cluster.members:
            member.signal(signal.SIGCONT)
        cluster.stop()
