"""Every campaign as last committed, from the engine's records.

The record of a campaign is small, because each step writes it. The list of its hosts is written
once, in records of its own.
"""

import asyncio
from collections.abc import Callable, Sequence

from forewarn.campaign.model import CAMPAIGN, NAMES, ROLL, Campaign, Roll, State, Turn
from forewarn.campaign.summary import Glances
from forewarn.engine.board import Board
from forewarn.engine.engine import Engine
from forewarn.engine.transaction import Transaction
from forewarn.errors import UnknownCampaign

ROLL_KEY = "campaigns"
CAMPAIGN_KEY = "campaign/{}/"
HOSTS_KEY = "campaign-hosts/{}/{}"
HOSTS_PER_RECORD = 5000


class CampaignCache:
    """All campaigns of the roll. Create it before the engine loads.

    `subscribe` registers a callback for each campaign that changed: as it was (None: new) and is.
    """

    def __init__(self, engine: Engine) -> None:
        self.deciding = asyncio.Lock()
        self._records = engine.records
        self._shown: dict[str, Campaign] = {}
        self._subscribers: list[Callable[[Campaign | None, Campaign], None]] = []
        self._glances: Glances | None = None
        engine.register("campaigns", ROLL)
        engine.register("campaign", CAMPAIGN, self._on_change)
        engine.register("campaign-hosts", NAMES)

    def subscribe(self, callback: Callable[[Campaign | None, Campaign], None]) -> None:
        self._subscribers.append(callback)

    def _on_change(self, key: str, campaign: Campaign | None, revision: int) -> None:
        if campaign is None:
            self._shown.pop(key, None)
            return
        before = self._shown.get(key)
        self._shown[key] = campaign
        for callback in self._subscribers:
            callback(before, campaign)

    @property
    def roll(self) -> Roll:
        roll: Roll | None = self._records.get(ROLL_KEY).value
        return roll or Roll()

    def get(self, campaign_id: str) -> Campaign | None:
        campaign: Campaign | None = self._records.get(CAMPAIGN_KEY.format(campaign_id)).value
        return campaign

    def find(self, campaign_id: str) -> Campaign:
        campaign = self.get(campaign_id.lower())
        if campaign is None:
            raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
        return campaign

    def all(self) -> list[Campaign]:
        return [campaign for _, campaign in self._records.values("campaign")]

    def alive(self) -> list[Campaign]:
        return [campaign for campaign in map(self.get, self.roll.alive) if campaign is not None]

    def listed(self) -> list[Campaign]:
        """The latest first."""
        newest_first = reversed((*self.roll.ended, *self.roll.alive))
        return [campaign for campaign in map(self.get, newest_first) if campaign is not None]

    def hosts_of(self, campaign_id: str, start: int, stop: int) -> list[str]:
        """Some of a campaign's hosts in their order, without those that are not known here yet."""
        positions = (divmod(index, HOSTS_PER_RECORD) for index in range(start, stop))
        found = ((self._piece(campaign_id, number), offset) for number, offset in positions)
        return [names[offset] for names, offset in found if offset < len(names)]

    def pieces(self, campaign_id: str) -> list[str]:
        """The keys of the records that list a campaign's hosts."""
        campaign = self.get(campaign_id)
        count = -(-campaign.total // HOSTS_PER_RECORD) if campaign else 0
        return [HOSTS_KEY.format(campaign_id, number) for number in range(count)]

    def _piece(self, campaign_id: str, number: int) -> tuple[str, ...]:
        names: tuple[str, ...] | None
        names = self._records.get(HOSTS_KEY.format(campaign_id, number)).value
        return names or ()

    def turns(self) -> dict[str, Turn]:
        """The hosts that wait for their turn, or have it, in campaigns that go on."""
        found: dict[str, Turn] = {}
        alive = self.alive()
        for campaign in alive:
            if campaign.state is not State.CANCELED:
                found |= dict.fromkeys(campaign.window, Turn.WAITING)
                for number in range(len(self.pieces(campaign.id))):
                    first = max(campaign.cursor - number * HOSTS_PER_RECORD, 0)
                    found |= dict.fromkeys(self._piece(campaign.id, number)[first:], Turn.WAITING)
        for campaign in alive:
            found |= {one.host: Turn.UNDER_WAY for one in campaign.under_way}
        return found

    def glances(self, board: Board) -> Glances:
        """The board as all campaigns look at it."""
        if self._glances is None:
            self._glances = Glances(board)
        return self._glances


def put_hosts(transaction: Transaction, campaign_id: str, hosts: Sequence[str]) -> None:
    for number, start in enumerate(range(0, len(hosts), HOSTS_PER_RECORD)):
        names = tuple(hosts[start : start + HOSTS_PER_RECORD])
        transaction.put(HOSTS_KEY.format(campaign_id, number), names)
