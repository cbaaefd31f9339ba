"""References to docs/protocol.md resolve: sections and sources exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from forewarn.cli.main import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"
NUMBER = r"\d+(?:\.\d+)?"
REFERENCE = re.compile(rf"\bprotocol ({NUMBER}(?:(?: and |, ){NUMBER})*)", re.IGNORECASE)
KEY = re.compile(r"(?<![.\w])[A-Z][A-Z0-9]+\b")


def sections() -> set[str]:
    return set(re.findall(rf"^##+ ({NUMBER})\.? ", PAGE.read_text(), re.MULTILINE))


def keys() -> set[str]:
    rows = re.findall(
        r"^\| ([^|]+) \|",
        PAGE.read_text().partition("## 0. ")[2].partition("## 1. ")[0],
        re.MULTILINE,
    )
    return {key.removesuffix("#N") for row in rows for key in row.split(", ")}


def texts() -> Iterator[tuple[Path, str]]:
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        yield path, path.read_text()


def test_every_referenced_section_exists() -> None:
    """A wrong reference is worse than none: the reader searches for it."""
    found = [
        (path.name, number)
        for path, text in texts()
        for reference in REFERENCE.findall(text)
        for number in re.findall(NUMBER, reference)
    ]

    assert len(found) > 200
    assert [reference for reference in found if reference[1] not in sections()] == []


def test_every_check_has_a_valid_reference(capsys: pytest.CaptureFixture[str]) -> None:
    """`forewarn conform --list` shows them to people who have only the documentation."""
    assert run(["conform", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    references = {check["reference"] for check in listed["checks"]}

    assert [
        reference
        for reference in references
        if not re.match(rf"PROTOCOL {NUMBER}|RFC \d+ ", reference)
    ] == []
    cited = {
        key
        for reference in references
        for aside in re.findall(r"\((.*?)\)", reference)
        for key in KEY.findall(aside)
    }
    assert len(cited) > 10
    assert cited - keys() == set()


def test_every_cited_source_is_listed() -> None:
    body = PAGE.read_text().partition("## 1. ")[2]
    cited = {key for tag in re.findall(r"\[[DF]: (.*?)\]", body) for key in KEY.findall(tag)}

    assert cited - keys() == set()
