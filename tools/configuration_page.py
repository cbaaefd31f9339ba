"""Write the tables of options in the documentation, from what the code declares.

python -m tools.configuration_page docs/configuration.md docs/hostd.md
"""

import sys
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from forewarn.cli.config_file import describe_expected, format_value
from forewarn.cli.options import DEMO, ClientConfig
from forewarn.config import Config, options
from forewarn.hostd.settings import HostdConfig

BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"
HEADER = "| key | flag | variable | default | what it does |\n|---|---|---|---|---|\n"


def render_reference() -> str:
    """The tables of docs/configuration.md."""
    demo = ", ".join(
        f"`{name}` {'a small demo fleet' if name == 'fleet' else f'`{format_value(value)}`'}"
        for name, value in DEMO.items()
    )
    tables = render_tables(Config, ClientConfig)
    return f"{tables}`forewarn demo` has other defaults: {demo}.\n"


def render_tables(*config_classes: type[Any]) -> str:
    return "".join(chain.from_iterable(map(_render, config_classes)))


def _render(config_class: type[Any]) -> Iterator[str]:
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
    tables = render_tables(HostdConfig) if page.name == "hostd.md" else render_reference()
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        _write_tables(Path(name))
