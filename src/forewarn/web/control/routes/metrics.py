"""`/metrics` for Prometheus.

Components keep the counters; this module exports them. Labels are bounded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from forewarn import __version__
from forewarn.engine.metrics import Histogram
from forewarn.web.control.dependencies import Call
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4"  # Litestar adds the charset

K = TypeVar("K")
Values = Mapping[K, float] | float
"""The value of a metric, or its values by label; several labels are a tuple."""


def make_metrics_route(service: Service, metadata: Metadata, polls: Polls) -> HTTPRouteHandler:
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service, metadata, polls))
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)

    @get("/metrics", tags=["Service"], media_type=CONTENT_TYPE)
    async def read_metrics(call: Call) -> Response[bytes]:  # `call` takes a turn
        """Metrics in the Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return read_metrics


class ServiceCollector(Collector):
    """Reads the counts of all parts.

    A scrape does not walk the fleet. Its work grows with what it shows one by one: `relay_refused`
    has values for each host that is connected here. It also grows with the number of problems, such
    as unserved VMs.
    """

    def __init__(self, service: Service, metadata: Metadata, polls: Polls) -> None:
        self._service = service
        self._engine = service.engine
        self._metadata = metadata
        self._polls = polls

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._requests()
        yield from self._events()
        yield from self._work()
        yield from self._operators()

    def _state(self) -> Iterator[Metric]:
        engine, board = self._engine, self._engine.board
        yield _gauge("build_info", "Always 1; the version is a label.", {__version__: 1}, "version")
        text = "1 while the store is followed and the server has its lease."
        yield _gauge("ready", text, engine.can_serve)
        text = "For how long the store has not been followed; 0 while it is."
        yield _gauge("store_stale_seconds", text, engine.stale_seconds)
        yield _gauge("scopes", "Scopes of the fleet.", len(board.scopes))
        yield _gauge("vms", "VMs of the fleet.", len(board.vms))
        text = "Running VMs without a poll for an hour, in scopes that were polled within a day."
        yield _gauge("vms_silent", text, engine.last_polls.silent_count)
        text = "Running VMs that get only errors, or have stopped polling when they moved."
        unserved = self._service.hosts.unserved
        yield _gauge("vms_unserved", text, unserved.counts(), "reason")
        text = "Errors that guests got from the relays of the hosts connected here, by reason."
        refused = {
            (host, reason): count
            for host, counts in list(unserved.refusals.items())
            for reason, count in counts.items()
        }
        yield _counter("relay_refused", text, refused, "host", "reason")
        yield _gauge("hosts", "Hosts of the fleet.", len(board.known_hosts))
        text = "Managed hosts whose daemon has no contact with any server."
        unreachable = self._service.hosts.managed.count_unreachable()
        yield _gauge("hosts_unreachable", text, unreachable)
        text = "VMs that two hosts run at the same time: both copies write to their disk."
        duplicates = self._service.hosts.duplicates
        yield _gauge("vms_duplicate", text, duplicates.count())
        text = "VMs of which a host that may not have them runs a copy, too."
        yield _gauge("vms_duplicate_not_accepted", text, duplicates.count_not_accepted())
        text = "Records of a newer version, or damaged: read-only here."
        yield _gauge("records_unreadable", text, len(engine.unreadable))
        text = "Difference between the machine's clock and ours after a jump."
        yield _gauge("clock_jump_seconds", text, engine.clock.jump_seconds)
        text = (
            "How far this server's clock is ahead of the other servers' clocks; negative: behind."
        )
        yield _gauge("clock_skew_seconds", text, engine.clock_skew_seconds)

    def _requests(self) -> Iterator[Metric]:
        polls, counts = self._polls, Counter(self._metadata.counts)
        counts["document", 200] += polls.documents_count
        counts["document", 304] += polls.unchanged_count
        text = "Requests of VMs, by kind and status of the response."
        yield _counter("requests", text, counts, "kind", "status")
        waiting = self._metadata.waiting + polls.waiting
        yield _gauge("waits", "Long polls that wait for a change.", waiting)
        yield _gauge("connections", "Open connections of VMs.", polls.connections_count)
        text = "Connections of VMs refused, or closed while idle, because a limit was reached."
        yield _counter("connection_limits_reached", text, polls.limits_reached, "limit")

    def _events(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        live = {key: count for key, count in self._engine.board.event_counts.items() if count}
        yield _gauge("events", "Events in a document.", live, "type", "status")
        text = "Changes of events, committed by this server."
        yield _counter("event_changes", text, metrics.events, "type", "change")
        text = "Approvals that counted, by who approved."
        yield _counter("approvals", text, metrics.approvals, "by")
        text = "Notice actually given: from scheduling to start."
        yield _histogram("notice_seconds", text, metrics.notice, "type")
        text = "From scheduling to the first approval."
        yield _histogram("approval_seconds", text, metrics.approval, "type")

    def _work(self) -> Iterator[Metric]:
        metrics = self._engine.metrics
        text = "Attempts to run an impact, by result."
        yield _counter("impacts", text, metrics.impacts, "type", "result")
        text = "Commits retried because another server wrote first."
        yield _counter("conflicts", text, metrics.conflicts)
        text = "How long the store took to commit."
        yield _histogram("commit_seconds", text, {(): metrics.store})

    def _operators(self) -> Iterator[Metric]:
        service, feed = self._service, self._service.feed
        campaigns = Counter(campaign.state for campaign in service.campaigns.all())
        yield _gauge("campaigns", "Stored campaigns, by state.", campaigns, "state")
        yield _counter("tokens_refused", "Requests with a bad token.", service.tokens.refused_count)
        yield _gauge("streams", "Open streams of the history.", feed.followers.total())
        yield _counter(
            "notes_trimmed", "Commits whose history entries were trimmed.", feed.entries_trimmed
        )
        failing = {receiver.name: receiver.is_failing for receiver in feed.webhooks}
        text = "1 while deliveries to a webhook fail."
        yield _gauge("webhook_failing", text, failing, "receiver")
        results = {
            (receiver.name, result): getattr(receiver, result)
            for receiver in feed.webhooks
            for result in ("delivered", "failed", "refused", "lost")
        }
        text = "Changes for each webhook, by result."
        yield _counter("webhooks", text, results, "receiver", "result")


def _gauge(name: str, text: str, values: Values[K], *labels: str) -> Metric:
    return _fill(GaugeMetricFamily(f"forewarn_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: Values[K], *labels: str) -> Metric:
    """Prometheus appends `_total` to the name."""
    return _fill(CounterMetricFamily(f"forewarn_{name}", text, labels=labels), values)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Values[K]) -> Metric:
    by_label = values.items() if isinstance(values, Mapping) else [((), values)]
    for key, value in by_label:
        family.add_metric(_labels(key), float(value))
    return family


def _histogram(
    name: str, text: str, histograms: Mapping[K, Histogram], *labels: str
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"forewarn_{name}", text, labels=labels)
    for key, histogram in histograms.items():
        family.add_metric(_labels(key), histogram.buckets(), histogram.sum)
    return family


def _labels(key: object) -> list[str]:
    return [str(part) for part in (key if isinstance(key, tuple) else (key,))]
