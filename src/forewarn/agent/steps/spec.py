"""A step's part of the settings, read member by member.

What is wrong is refused with its place, what was expected, what came.
"""

import difflib
import sys
from collections.abc import Mapping, Sequence

from forewarn.errors import Invalid

SHOWN_MAX = 60
_MISSING = object()


class Spec:
    """The members of one step.

    Where a kind has a `short` member, its bare value stands for the table with that one member.
    """

    def __init__(
        self, value: object, where: str, *, members: Sequence[str], short: str = ""
    ) -> None:
        self.where = where
        self._short = "" if isinstance(value, dict) else short
        self._given: Mapping[str, object] = value if isinstance(value, dict) else {short: value}
        if not isinstance(value, dict) and not short:
            raise Invalid(
                f"{where}: expected a table with {', '.join(members)}, got {shown(value)}",
                field=where,
            )
        for name in self._given:
            if name not in members:
                near = difflib.get_close_matches(name[:SHOWN_MAX], members, 1)
                hint = (
                    f"did you mean '{near[0]}'?"
                    if near
                    else f"expected one of {', '.join(members)}"
                )
                raise Invalid(
                    f"{self._place(name)}: unknown member; {hint}", field=self._place(name)
                )

    def text(self, name: str, default: str | None = None, *, expected: str = "some text") -> str:
        """Without a default, the member must be there and not empty."""
        value = self._given.get(name, default)
        if not isinstance(value, str) or "\0" in value or (not value and default is None):
            raise self.refused(name, expected)
        return value

    def texts(self, name: str, *, expected: str) -> tuple[str, ...]:
        value = self._given.get(name)
        if not isinstance(value, list) or not value:
            raise self.refused(name, expected)
        if not all(isinstance(part, str) and part and "\0" not in part for part in value):
            raise self.refused(name, expected)
        return tuple(value)

    def pairs(self, name: str, *, expected: str) -> dict[str, str]:
        """No environment can hold a name with "=" in it, nor can a header."""
        value = self._given.get(name, {})
        if not isinstance(value, dict) or not all(
            isinstance(part, str) and "\0" not in part for part in value.values()
        ):
            raise self.refused(name, expected)
        if not all(key and not {"=", "\0"} & set(key) for key in value):
            raise self.refused(name, f"{expected}, the names without '='")
        return dict(value)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        value = self._given.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, f"one of {', '.join(choices)}")
        return value

    def is_set(self, name: str, *, default: bool = False) -> bool:
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise self.refused(name, "true or false")
        return value

    def seconds(self, name: str, default: float, *, most: float) -> float:
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self.refused(name, f"0 to {most:g} seconds")
        return float(value)

    def get(self, name: str) -> object:
        return self._given.get(name)

    def refused(self, name: str, expected: str) -> Invalid:
        got = shown(self._given.get(name, _MISSING))
        return Invalid(
            f"{self._place(name)}: expected {expected}, got {got}", field=self._place(name)
        )

    def _place(self, name: str) -> str:
        return self.where if name == self._short else f"{self.where}.{name}"


def only_on_unix(kind: str, where: str, platform: str = sys.platform) -> None:
    """For the kinds that a Windows machine cannot have: said when the settings are read, not when
    an event comes.
    """
    if platform == "win32":
        raise Invalid(
            f"{where}: expected a kind of step that Windows has, got '{kind}', which only Unix has",
            field=where,
        )


def shown(value: object) -> str:
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"
