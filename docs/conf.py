"""The documentation as a site, from the same Markdown that GitHub shows. See `make docs`."""

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project = "Forewarn"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
include_patterns = ["docs/*.md", "examples/*.md", "examples/*/README.md", "C*.md", "SECURITY.md"]
root_doc = "docs/README"
html_theme = "furo"
html_title = "Forewarn"
html_copy_source = html_show_copyright = False
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# A file of the repository that is not a page, such as a unit, becomes a download.
suppress_warnings = ["misc.highlighting_failure", "toc.not_included"]
# `make docs` puts Mermaid there, so that the site loads nothing from elsewhere.
html_static_path = [str(ROOT / "build" / "mermaid")]
mermaid_use_local = "mermaid.esm.min.mjs"
mermaid_width = mermaid_height = "auto"
mermaid_fullscreen = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the sections and links of the index into the sidebar of the site."""
    if page != root_doc:
        return
    for section in source[0].split("\n## ")[1:]:
        links = re.findall(r"^- \[(.*?)\]\((.*?)\)", section, re.MULTILINE)
        caption = section.splitlines()[0]
        pages = "\n".join(f"{title} <{path}>" for title, path in links)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
