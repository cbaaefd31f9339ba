"""On which line of a TOML text a value stands, which tomllib does not tell.

Only for texts that tomllib has understood. Pure.
"""

import re

Path = tuple[str | int, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"  # texts, the long ones first
    r"|\#[^\n]*|[\[\]{}=,\n]|[^\s\[\]{}=,\#\"']+",
    re.DOTALL,
)


class Lines:
    """The lines of one text.

    The text is indexed once, when a line is first asked for, in time linear in its length.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: dict[Path, int] | None = None

    def find_line(self, path: Path) -> int:
        """The line of the value at this path or, where it has none of its own, of what is around
        it.
        """
        if self._lines is None:
            self._lines = Index(self._text).lines
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


class Index:
    """One walk over the text: statements, in them values, in those values again."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._tokens: list[tuple[str, int]] = []
        line, counted_to = 1, 0
        for match in _TOKEN.finditer(text):
            line += text.count("\n", counted_to, match.start())
            counted_to = match.start()
            if not match.group().startswith("#"):
                self._tokens.append((match.group(), line))
        self._at = 0
        self._counts: dict[Path, int] = {}
        self._walk()

    def _walk(self) -> None:
        table: Path = ()
        while self._at < len(self._tokens):  # each turn takes a token
            if self._peek() == "\n":
                self._take()
            elif self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> Path:
        line = self._tokens[self._at][1]
        depth = 0
        while self._peek() == "[":
            self._take()
            depth += 1
        names = self._key("]")
        for _ in range(depth - 1):
            self._take()
        path: Path = ()
        for number, name in enumerate(names, start=1):
            path = (*path, name)
            if number == len(names) and depth == 2:
                self._counts[path] = self._counts.get(path, -1) + 1
            if path in self._counts:
                path = (*path, self._counts[path])
        self.lines[path] = line
        return path

    def _pair(self, table: Path) -> None:
        line = self._tokens[self._at][1]
        path = (*table, *self._key("="))
        self.lines[path] = line
        self._value(path)

    def _key(self, end: str) -> list[str]:
        """The parts of a dotted key, and past its end."""
        parts: list[str] = []
        while (token := self._take()) != end:
            parts += (
                [token[1:-1]] if token[0] in "\"'" else [part for part in token.split(".") if part]
            )
        return parts

    def _value(self, path: Path) -> None:
        opening = self._take()
        if opening not in ("[", "{"):
            while self._peek() not in (
                "\n",
                ",",
                "]",
                "}",
                "",
            ):  # a date and its time are two tokens
                self._take()
            return
        count = 0
        while self._peek() not in ("]", "}", ""):
            if self._peek() in (",", "\n"):
                self._take()
            elif opening == "{":
                self._pair(path)
            else:
                self.lines[(*path, count)] = self._tokens[self._at][1]
                self._value((*path, count))
                count += 1
        self._take()

    def _peek(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._tokens[self._at][0]
        self._at += 1
        return token
