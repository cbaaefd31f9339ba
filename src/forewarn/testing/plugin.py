"""The pytest plugin: the fixture `scheduled_events`.

Every start of pytest loads it, so it imports none of the lab before use.
"""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab

MARKER = "scheduled_events"
SECTION = "scheduled events"
LAB = pytest.StashKey["Lab"]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(fleet=None, *, rate=None, start=None, seed=0, environment=''): the lab that the fixture `{MARKER}` gives:"
        " as forewarn.testing.lab.Lab has it; a fleet's path is relative to the test file; `environment` names a VM whose"
        " endpoint clients find in the environment",
    )


@pytest.fixture
def scheduled_events(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator["Lab"]:
    """A lab of this test's own, at the test's disposal: events on demand, and a clock that stands
    still until it is told.
    """
    options = _options(request.node.get_closest_marker(MARKER), request.path.parent)
    environment = options.pop("environment", "")
    with _lab(options) as lab:
        request.node.stash[LAB] = lab
        for name, value in lab.environment(environment).items() if environment else ():
            monkeypatch.setenv(name, value)
        yield lab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what was asked of the endpoint, and what became of it."""
    report = yield
    lab = item.stash.get(LAB, None)
    if report.failed and lab is not None:
        report.sections.append(
            (SECTION, str(lab.transcript) or "nothing was asked, and nothing happened")
        )
    return report


def _options(marker: pytest.Mark | None, folder: Path) -> dict[str, Any]:
    if marker is None:
        return {}
    options = dict(marker.kwargs)
    if len(marker.args) > 1 or (marker.args and "fleet" in options):
        pytest.fail(
            f"@pytest.mark.{MARKER} takes one fleet, and all else by name; got {marker.args}",
            pytrace=False,
        )
    fleet = marker.args[0] if marker.args else options.get("fleet")
    return {**options, "fleet": folder / fleet if isinstance(fleet, str) else fleet}


def _remedy(module: str | None) -> str:
    """What to do about a missing module.

    One of the standard library cannot be installed: the platform lacks it.
    """
    return (
        f", which Python lacks on {sys.platform}"
        if module in sys.stdlib_module_names
        else ": pip install 'forewarn[server]'"
    )


def _lab(options: dict[str, Any]) -> "Lab":
    try:
        from forewarn.errors import Error
        from forewarn.testing.lab import Lab
    except ModuleNotFoundError as missing:
        pytest.fail(
            f"the fixture `{MARKER}` needs {missing.name}{_remedy(missing.name)}", pytrace=False
        )
    try:
        return Lab(**options)
    except (TypeError, Error) as error:
        why = error.message if isinstance(error, Error) else str(error)
    pytest.fail(
        f"@pytest.mark.{MARKER}: {why}", pytrace=False
    )  # not above: that would show what it came from
