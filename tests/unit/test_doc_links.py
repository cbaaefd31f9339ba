"""Links between the pages of the documentation lead somewhere."""

import re
import string
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
    if "node_modules" not in page.parts
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def list_anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower().strip()
        kept = set(string.punctuation) - set("-_")
        anchor = "".join(char for char in text if char not in kept).replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


def list_broken_links(page: Path) -> list[str]:
    text = CODE.sub("", FENCE.sub("", page.read_text()))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    broken = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in list_anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert list_broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading\n\n## It's `code`, twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-heading) [c](other.md#its-code-twice)\n"
        "[d](missing.md) [e](other.md#missing) `[f](in-code.md)` [g](https://example.org)\n"
    )
    assert list_broken_links(page) == ["missing.md", "other.md#missing"]


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()
