"""Every campaign as last committed, and the fleet as the rules of campaigns see it.

The record of a campaign is small, because each step writes it. The list of its hosts is a record of
its own, written once.
"""

from collections.abc import Callable

from forewarn.campaign.budget import ScopeSummary, summarize
from forewarn.campaign.model import (
    CAMPAIGN,
    CAMPAIGN_HOSTS,
    Campaign,
    CampaignState,
    HostPriority,
)
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.errors import UnknownCampaign, UnknownHost

CAMPAIGN_KEY = "campaign/{}/"
HOSTS_KEY = "campaign-hosts/{}/0"
"""Version 0.2 numbered several records of a long list; only the first one is left."""
SUMMARIES_MAX = 10_000


class CampaignCache:
    """The engine's records of campaigns. Create it before the engine loads."""

    def __init__(self, engine: Engine) -> None:
        self._records = engine.records
        self._subscribers: list[Callable[[Campaign | None, Campaign], None]] = []
        self._last: dict[str, Campaign] = {}
        self.fleet = BoardView(engine.board)
        engine.register("campaign", CAMPAIGN, self._on_change)
        engine.register("campaign-hosts", CAMPAIGN_HOSTS)

    def subscribe(self, callback: Callable[[Campaign | None, Campaign], None]) -> None:
        """Call this with each campaign that changed: as it was (None: new) and as it is."""
        self._subscribers.append(callback)

    def _on_change(self, key: str, campaign: Campaign | None, revision: int) -> None:
        before = self._last.pop(key, None)
        if campaign is not None:
            self._last[key] = campaign
            for callback in self._subscribers:
                callback(before, campaign)

    def find(self, campaign_id: str) -> Campaign:
        campaign: Campaign | None = self._records.get(campaign_key(campaign_id)).value
        if campaign is None:
            raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
        return campaign

    def all(self) -> list[Campaign]:
        """The oldest first."""
        campaigns: list[Campaign] = [value for _, value in self._records.values("campaign")]
        return sorted(campaigns, key=lambda campaign: campaign.number)

    def live(self) -> list[Campaign]:
        return [campaign for campaign in self.all() if not campaign.is_over]

    def hosts_of(self, campaign_id: str) -> tuple[str, ...] | None:
        """A campaign's hosts in their order; None if the campaign is over, or not known yet."""
        hosts: tuple[str, ...] | None = self._records.get(HOSTS_KEY.format(campaign_id)).value
        return hosts

    def host_priorities(self) -> dict[str, HostPriority]:
        """The hosts of live campaigns that wait or are in progress."""
        priorities: dict[str, HostPriority] = {}
        live = self.live()
        for campaign in live:
            if campaign.state is not CampaignState.CANCELED:
                rest = (self.hosts_of(campaign.id) or ())[campaign.cursor :]
                priorities |= dict.fromkeys((*campaign.window, *rest), HostPriority.WAITING)
        for campaign in live:
            priorities |= {run.host: HostPriority.IN_PROGRESS for run in campaign.in_progress}
        return priorities


def campaign_key(campaign_id: str) -> str:
    return CAMPAIGN_KEY.format(campaign_id.lower())


class BoardView:
    """The board as a `FleetView`. A large scope is summarized once for each of its revisions."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._summaries: dict[str, ScopeSummary] = {}

    @property
    def revision(self) -> int:
        return self._board.revision

    def scope(self, name: str) -> ScopeSummary | None:
        published = self._board.scopes.get(name)
        if published is None:
            self._summaries.pop(name, None)
            return None
        summary = self._summaries.get(name)
        if summary is None or summary.revision != published.revision:
            if len(self._summaries) >= SUMMARIES_MAX:
                self._summaries.clear()
            summary = self._summaries[name] = summarize(published.scope, published.revision)
        return summary

    def scopes_on(self, host: str) -> list[ScopeSummary] | None:
        try:
            published = self._board.scopes_on(host)
        except UnknownHost:
            return None
        summaries = (self.scope(one.scope.name) for one in published)
        return [summary for summary in summaries if summary is not None]
