"""References to the protocol resolve: each section and each source that the product names stands in
docs/protocol.md.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


def test_every_section_that_code_or_docs_refer_to_exists() -> None:
    """A reference that leads nowhere is worse than none: the reader looks for it."""
    found = [
        (path.name, one)
        for path, text in texts()
        for all_ in REFERENCE.findall(text)
        for one in re.findall(NUMBER, all_)
    ]

    assert len(found) > 200
    assert [reference for reference in found if reference[1] not in sections()] == []


def test_every_check_refers_to_a_section_or_an_rfc_and_to_known_sources() -> None:
    """`forewarn conform --list` shows both to people who have nothing but the documentation."""
    command = [sys.executable, "-m", "forewarn", "conform", "--list", "--json"]
    listed = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
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


def test_every_source_that_the_page_itself_cites_is_in_its_list() -> None:
    body = PAGE.read_text().partition("## 1. ")[2]
    cited = {key for tag in re.findall(r"\[[DF]: (.*?)\]", body) for key in KEY.findall(tag)}

    assert cited - keys() == set()
