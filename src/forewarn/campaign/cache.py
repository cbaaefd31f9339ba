"""Every campaign as last committed, beside the board. `learn` is the only way in, and news that is
older changes nothing.

The record of a campaign is small, for it is written at every step; the list of its hosts is written
once, in pieces of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forewarn.campaign.model import Campaign, Roll, State, Turn
from forewarn.campaign.summary import Glances
from forewarn.engine import record
from forewarn.engine.board import Board
from forewarn.errors import UnknownCampaign
from forewarn.store.base import Record, Write

KINDS = ("campaigns", "campaign", "campaign-hosts")
ROLL_KEY = "campaigns"
CAMPAIGN_KEY = "campaign/{}/"
HOSTS_KEY = "campaign-hosts/{}/{}"
HOSTS_PER_RECORD = 5000


class Kept(NamedTuple):
    """A campaign, and the revision at which it stood so."""

    campaign: Campaign
    revision: int


class Piece(NamedTuple):
    """Some of a campaign's hosts."""

    names: tuple[str, ...]
    revision: int


class CampaignCache:
    """All campaigns that the roll names.

    `followers` hear of each that changed: as it was, if it was, and as it is.
    """

    def __init__(self) -> None:
        self.roll = Roll()
        self.roll_revision = 0
        self.kept: dict[str, Kept] = {}
        self.hosts: dict[str, dict[int, Piece]] = {}
        self.followers: list[Callable[[Campaign | None, Campaign], None]] = []
        self.deciding = asyncio.Lock()
        self._glances: Glances | None = None

    def learn(self, found: Record) -> None:
        kind, _, rest = found.key.rstrip("/").partition("/")
        if kind == ROLL_KEY:
            self._learn_roll(found)
        elif found.value is None:
            return  # the roll tells who is no more
        elif kind == "campaign":
            self._learn_campaign(found, found.value)
        else:
            campaign, _, number = rest.partition("/")
            self.hosts.setdefault(campaign, {})[int(number)] = Piece(
                record.NAMES.decode(found.value), found.revision
            )

    def find(self, campaign_id: str) -> Kept:
        found = self.kept.get(campaign_id.lower())
        if found is None:
            raise UnknownCampaign(f"there is no campaign {campaign_id!r}", campaign=campaign_id)
        return found

    def alive(self) -> list[Campaign]:
        return [self.kept[one].campaign for one in self.roll.alive if one in self.kept]

    def listed(self) -> list[Campaign]:
        """The latest first."""
        return [
            self.kept[one].campaign
            for one in reversed((*self.roll.ended, *self.roll.alive))
            if one in self.kept
        ]

    def hosts_of(self, campaign_id: str, start: int, stop: int) -> list[str]:
        """Some of a campaign's hosts in their order; none of those that are not known here yet."""
        pieces = self.hosts.get(campaign_id, {})
        places = (divmod(index, HOSTS_PER_RECORD) for index in range(start, stop))
        return [
            pieces[number].names[place]
            for number, place in places
            if number in pieces and place < len(pieces[number].names)
        ]

    def turns(self) -> dict[str, Turn]:
        """The hosts that wait for their turn, or have it, in campaigns that go on."""
        found: dict[str, Turn] = {}
        alive = self.alive()
        for campaign in alive:
            if campaign.state is not State.CANCELED:
                found |= dict.fromkeys(campaign.window, Turn.WAITING)
                for number, piece in self.hosts.get(campaign.id, {}).items():
                    found |= dict.fromkeys(
                        piece.names[max(campaign.cursor - number * HOSTS_PER_RECORD, 0) :],
                        Turn.WAITING,
                    )
        for campaign in alive:
            found |= {one.host: Turn.UNDER_WAY for one in campaign.under_way}
        return found

    def glances(self, board: Board) -> Glances:
        """The board as all campaigns look at it."""
        if self._glances is None:
            self._glances = Glances(board)
        return self._glances

    def _learn_roll(self, found: Record) -> None:
        if found.revision <= self.roll_revision or found.value is None:
            return
        self.roll, self.roll_revision = record.ROLL.decode(found.value), found.revision
        alive = set(self.roll.alive)
        known = alive.union(self.roll.ended)
        for gone in [
            one
            for one, kept in self.kept.items()
            if one not in known and kept.revision < found.revision
        ]:
            del self.kept[gone]
        for gone in [one for one in self.hosts if one not in alive]:
            del self.hosts[gone]

    def _learn_campaign(self, found: Record, value: bytes) -> None:
        campaign = record.CAMPAIGN.decode(value)
        before = self.kept.get(campaign.id)
        if before is not None and before.revision >= found.revision:
            return
        self.kept[campaign.id] = Kept(campaign, found.revision)
        for follower in self.followers:
            follower(before.campaign if before else None, campaign)


def written(campaign: Campaign, revision: int) -> Write:
    return Write(CAMPAIGN_KEY.format(campaign.id), record.CAMPAIGN.encode(campaign), revision)


def written_roll(roll: Roll, revision: int) -> Write:
    return Write(ROLL_KEY, record.ROLL.encode(roll), revision)


def written_hosts(campaign_id: str, hosts: Sequence[str]) -> list[Write]:
    starts = enumerate(range(0, len(hosts), HOSTS_PER_RECORD))
    return [
        Write(
            HOSTS_KEY.format(campaign_id, number),
            record.NAMES.encode(tuple(hosts[start : start + HOSTS_PER_RECORD])),
            0,
        )
        for number, start in starts
    ]


def forgotten(shelf: CampaignCache, campaign_id: str) -> list[Write]:
    """A campaign that is too long ago is no more."""
    kept = shelf.kept.get(campaign_id)
    return [] if kept is None else [Write(CAMPAIGN_KEY.format(campaign_id), None, kept.revision)]


def forgotten_hosts(shelf: CampaignCache, campaign_id: str) -> list[Write]:
    """Nobody asks for the hosts of a campaign that is over."""
    pieces = shelf.hosts.get(campaign_id, {})
    return [
        Write(HOSTS_KEY.format(campaign_id, number), None, piece.revision)
        for number, piece in pieces.items()
    ]
