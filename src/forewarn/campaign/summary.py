"""The board as the rules of campaigns look at it: scopes at a glance, each gone through once for
each of its revisions.
"""

from forewarn.campaign.budget import Standing, standing
from forewarn.engine.board import Board
from forewarn.errors import UnknownHost

GLANCES_MAX = 10_000


class Glances:
    """Glances at scopes and hosts.

    All who ask on one server share one of these: a large scope takes a while.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._known: dict[str, Standing] = {}

    @property
    def revision(self) -> int:
        return self._board.revision

    def standing(self, scope: str) -> Standing | None:
        place = self._board.scopes.get(scope)
        if place is None:
            self._known.pop(scope, None)
            return None
        known = self._known.get(scope)
        if known is None or known.revision != place.revision:
            if len(self._known) >= GLANCES_MAX:
                self._known.clear()
            known = self._known[scope] = standing(place.scope, place.revision)
        return known

    def on_host(self, host: str) -> list[Standing] | None:
        try:
            places = self._board.scopes_on(host)
        except UnknownHost:
            return None
        return [
            found
            for found in (self.standing(place.scope.name) for place in places)
            if found is not None
        ]
