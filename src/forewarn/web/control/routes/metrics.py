"""`/metrics` for Prometheus.

The parts count with plain numbers; here they are named, when somebody asks. Labels are bounded.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from forewarn.web.metadata.app import Metadata
from forewarn.web.metadata.fast_path import Polls
from forewarn.web.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4"  # Litestar adds the charset

K = TypeVar("K", bound=tuple[str, ...])
S = TypeVar("S", bound=str)


def route(service: Service, metadata: Metadata, polls: Polls) -> HTTPRouteHandler:
    """The handler of `/metrics`."""
    registry = CollectorRegistry()
    registry.register(Numbers(service, metadata, polls))
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)

    @get("/metrics", tags=["Service"], media_type=CONTENT_TYPE, sync_to_thread=False)
    def metrics() -> Response[bytes]:
        """Numbers for Prometheus, in its text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return metrics


class Numbers(Collector):
    """All our numbers.

    They are counted where they change, so the work of a scrape does not grow with the fleet.
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
        yield gauge(
            "forewarn_build_info",
            "Always 1; the version is a label.",
            {(__version__,): 1},
            ["version"],
        )
        yield gauge(
            "forewarn_ready",
            "1 while the store is read and followed.",
            {(): float(engine.can_serve)},
        )
        yield gauge("forewarn_scopes", "Scopes of the fleet.", {(): len(board.scopes)})
        yield gauge("forewarn_vms", "VMs of the fleet.", {(): len(board.vms)})
        yield gauge("forewarn_hosts", "Hosts of the fleet.", {(): len(board.known_hosts)})
        unreadable = len(engine.unreadable)
        yield gauge(
            "forewarn_records_unreadable",
            "Records of a newer version, or damaged: read-only here.",
            {(): unreadable},
        )
        skew = engine.metrics.skew_seconds
        jump = engine.clock.jump_seconds
        yield gauge(
            "forewarn_clock_jump_seconds",
            "How far the machine's clock jumped away from our time.",
            {(): jump},
        )
        yield gauge(
            "forewarn_clock_skew_seconds",
            "How far another server's clock is ahead of ours, by its stamps.",
            {(): skew},
        )

    def _requests(self) -> Iterator[Metric]:
        counts = Counter(
            {
                (kind, str(status)): number
                for (kind, status), number in self._metadata.counts.items()
            }
        )
        counts["document", "200"] += self._polls.documents_count
        counts["document", "304"] += self._polls.unchanged_count
        yield counter(
            "forewarn_requests",
            "Requests of VMs, by what they ask for and the answer.",
            counts,
            ["kind", "status"],
        )
        yield gauge(
            "forewarn_waits", "Polls that wait for a change just now.", {(): self._metadata.waiting}
        )
        polls = self._polls
        yield gauge(
            "forewarn_connections",
            "Connections of VMs that are open.",
            {(): polls.connections_count},
        )
        words = "Connections of VMs refused, or closed while idle, because a limit was reached."
        yield counter(
            "forewarn_connection_limits_reached", words, by_one(polls.limits_reached), ["limit"]
        )

    def _events(self) -> Iterator[Metric]:
        counts = self._engine.board.event_counts.items()
        live = {(str(type_), str(status)): number for (type_, status), number in counts if number}
        tally = self._engine.metrics
        yield gauge("forewarn_events", "Events that stand in a document.", live, ["type", "status"])
        changes = {
            (str(type_), str(what)): number for (type_, what), number in tally.events.items()
        }
        yield counter(
            "forewarn_event_changes",
            "What became of events, told by this server.",
            changes,
            ["type", "change"],
        )
        yield counter(
            "forewarn_approvals",
            "Approvals that counted, by whose word.",
            by_one(tally.approvals),
            ["by"],
        )
        yield histogram(
            "forewarn_notice_seconds",
            "Notice actually given: from the announcement to the start.",
            tally.notice,
        )
        yield histogram(
            "forewarn_approval_seconds",
            "From the announcement to the first approval.",
            tally.approval,
        )

    def _work(self) -> Iterator[Metric]:
        tally = self._engine.metrics
        impacts = {
            (str(type_), result): number for (type_, result), number in tally.impacts.items()
        }
        yield counter(
            "forewarn_impacts",
            "Tries to carry an impact out, by how they ended.",
            impacts,
            ["type", "result"],
        )
        yield counter(
            "forewarn_conflicts", "Races for a scope that this server lost.", {(): tally.conflicts}
        )
        yield histogram(
            "forewarn_commit_seconds",
            "How long the store took to commit.",
            {"": tally.store},
            label="",
        )

    def _operators(self) -> Iterator[Metric]:
        service, tail = self._service, self._service.feed
        listed = service.campaigns.cache.listed()
        campaigns = Counter((str(campaign.state),) for campaign in listed)
        yield gauge(
            "forewarn_campaigns",
            "Campaigns that are remembered, by how they are.",
            campaigns,
            ["state"],
        )
        yield counter(
            "forewarn_tokens_refused",
            "Requests with a bad token.",
            {(): service.tokens.refused_count},
        )
        yield gauge("forewarn_streams", "Streams of changes that are open.", {(): tail.followers})
        yield counter(
            "forewarn_notes_trimmed",
            "Notes of the history that were too old.",
            {(): tail.entries_trimmed},
        )
        failing = {(one.name,): float(one.is_failing) for one in tail.webhooks}
        yield gauge(
            "forewarn_webhook_failing",
            "1 while a receiver does not take what it is told.",
            failing,
            ["receiver"],
        )
        results = ("delivered", "failed", "refused", "lost")
        told = {
            (one.name, result): getattr(one, result) for one in tail.webhooks for result in results
        }
        yield counter(
            "forewarn_webhooks",
            "Changes for each receiver, by what became of them.",
            told,
            ["receiver", "result"],
        )


def gauge(
    name: str, words: str, values: Mapping[K, float], labels: Iterable[str] = ()
) -> GaugeMetricFamily:
    """A number that goes up and down, for each combination of labels."""
    family = GaugeMetricFamily(name, words, labels=list(labels))
    for key, value in sorted(values.items()):
        family.add_metric(list(key), value)
    return family


def counter(
    name: str, words: str, values: Mapping[K, float], labels: Iterable[str] = ()
) -> CounterMetricFamily:
    """A number that only grows; Prometheus calls it `…_total`."""
    family = CounterMetricFamily(name, words, labels=list(labels))
    for key, value in sorted(values.items()):
        family.add_metric(list(key), value)
    return family


def histogram(
    name: str, words: str, spreads: Mapping[S, Histogram], label: str = "type"
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, words, labels=[label] if label else [])
    for key, spread in sorted(spreads.items()):
        family.add_metric([str(key)] if label else [], spread.buckets(), spread.sum)
    return family


def by_one(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): value for key, value in values.items()}
