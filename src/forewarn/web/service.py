"""The parts of the service that the web layer uses, built together over one store."""

from collections.abc import Callable
from typing import NamedTuple

from forewarn.auth.sessions import Sessions
from forewarn.auth.tokens import Tokens
from forewarn.campaign.service import Campaigns
from forewarn.core.timing import Timing
from forewarn.engine.clock import Clock
from forewarn.engine.engine import Engine
from forewarn.engine.host_contact import HostContacts
from forewarn.engine.managed_hosts import ManagedHosts
from forewarn.engine.operations import Operations
from forewarn.engine.remote_hosts import RemoteHosts
from forewarn.engine.turns import Turns
from forewarn.history.feed import HistoryFeed
from forewarn.history.webhooks import register_records
from forewarn.store.base import Store


class Service(NamedTuple):
    """Everything but the workers and the listeners.

    `is_iso`: VMs read NotBefore in the format of Azure's documentation.
    """

    engine: Engine
    operations: Operations
    campaigns: Campaigns
    feed: HistoryFeed
    tokens: Tokens
    sessions: Sessions
    hosts: RemoteHosts
    turns: Turns
    is_iso: bool = False

    def stop(self) -> None:
        """End all streams, and answer all requests that wait."""
        self.feed.stop()
        self.hosts.stop()


def build_service(
    store: Store, clock: Clock, timing: Timing, make_id: Callable[[], str]
) -> Service:
    """The service over a store that has not been read yet: call `engine.load()` next."""
    engine = Engine(store, clock, timing)
    feed = HistoryFeed(store)
    engine.subscribe(lambda entries: feed.notify())
    register_records(engine)
    managed = ManagedHosts(engine)
    contacts = HostContacts(engine, managed)
    operations = Operations(engine, make_id, contacts.silent_since)
    hosts = RemoteHosts(engine, operations, managed, contacts)
    campaigns = Campaigns(engine, hosts.managed.is_unreachable)
    hosts.avoid = campaigns.host_priorities
    tokens = Tokens(engine)
    sessions = Sessions(engine, tokens)
    return Service(engine, operations, campaigns, feed, tokens, sessions, hosts, Turns())
