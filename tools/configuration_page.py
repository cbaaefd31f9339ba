"""Write the tables of docs/configuration.md, from the options that `forewarn.config` declares.

python -m tools.configuration_page docs/configuration.md
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from forewarn.cli.options import DEMO, ClientConfig, describe_expected, format_value
from forewarn.config import Config, options

BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"
HEADER = "| key | flag | variable | default | what it does |\n|---|---|---|---|---|\n"


def render_reference() -> str:
    """The tables of docs/configuration.md."""
    demo = ", ".join(
        f"`{name}` {'a small demo fleet' if name == 'fleet' else f'`{format_value(value)}`'}"
        for name, value in DEMO.items()
    )
    tables = "".join((*_render_tables(Config), *_render_tables(ClientConfig)))
    return f"{tables}`forewarn demo` has other defaults: {demo}.\n"


def _render_tables(config_class: type[Any]) -> Iterator[str]:
    for section, group in groupby(options(config_class), key=lambda each: each.section):
        yield f"### {section}\n\n{HEADER}"
        for each in group:
            flag = "none, because it is a secret" if each.is_secret else f"`{each.flag}`"
            default = format_value(each.default)
            cells = (
                f"`{each.name}`",
                flag,
                f"`{each.variable}`",
                f"`{default}`" if default else "",
            )
            yield f"| {' | '.join(cells)} | {each.help} {describe_expected(each)} |\n"
        yield "\n"


def _write_tables(page: Path) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{render_reference()}\n{END}{after}")


if __name__ == "__main__":
    _write_tables(Path(sys.argv[1]))
