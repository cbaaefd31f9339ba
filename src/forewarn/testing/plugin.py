"""The pytest plugin with the fixture `scheduled_events`.

pytest loads it at every start, so it imports the lab only when a test uses it.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from forewarn.testing.lab import Lab

T = TypeVar("T")

MARKER = "scheduled_events"
SECTION = "scheduled events"
LAB = pytest.StashKey["Lab"]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(fleet=None, *, rate=None, start=None, seed=0, environment='', intercept=''):"
        f" options of the fixture `{MARKER}`, as for forewarn.testing.Lab. A fleet's path is"
        " relative to the test file; `environment` names a VM whose endpoint is put into"
        " environment variables, `intercept` one that gets the connections to 169.254.169.254:80",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test with the marker uses the fixture, even if it has no argument for it."""
    names: list[str] = getattr(item, "fixturenames", [MARKER])
    if MARKER not in names and item.get_closest_marker(MARKER) is not None:
        names.append(MARKER)


@pytest.fixture
def scheduled_events(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator["Lab"]:
    """A lab for this test: events on demand, and a clock that the test moves."""
    options = _read_options(request.node.get_closest_marker(MARKER), request.path.parent)
    environment, intercept = options.pop("environment", ""), options.pop("intercept", "")
    with _make_lab(options) as lab, ExitStack() as stack:

        def prepare() -> None:
            for name, value in lab.environment(environment).items() if environment else ():
                monkeypatch.setenv(name, value)
            if intercept:
                stack.enter_context(lab.intercept(intercept))

        request.node.stash[LAB] = lab
        _in_one_line(prepare)
        yield lab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the lab's transcript to the report of a failed test."""
    report = yield
    lab = item.stash.get(LAB, None)
    if report.failed and lab is not None:
        report.sections.append((SECTION, str(lab.transcript) or "no requests and no changes"))
    return report


def _read_options(marker: pytest.Mark | None, folder: Path) -> dict[str, Any]:
    if marker is None:
        return {}
    options = dict(marker.kwargs)
    if len(marker.args) > 1 or (marker.args and "fleet" in options):
        pytest.fail(
            f"@pytest.mark.{MARKER} takes one fleet, and the rest by name; got {marker.args}",
            pytrace=False,
        )
    fleet = marker.args[0] if marker.args else options.get("fleet")
    return {**options, "fleet": folder / fleet if isinstance(fleet, str) else fleet}


def _make_lab(options: dict[str, Any]) -> "Lab":
    try:
        from forewarn.testing.lab import Lab
    except ModuleNotFoundError as error:
        # A module of the standard library cannot be installed: the platform lacks it.
        is_standard = error.name in sys.stdlib_module_names
        lacks = f", which Python lacks on {sys.platform}"
        remedy = lacks if is_standard else ": pip install 'forewarn[lab]'"
        pytest.fail(f"the fixture `{MARKER}` needs {error.name}{remedy}", pytrace=False)
    return _in_one_line(lambda: Lab(**options))


def _in_one_line(work: Callable[[], T]) -> T:
    """Do what the marker asks for. A wrong option fails the test without a traceback."""
    from forewarn.errors import Error

    try:
        return work()
    except (TypeError, Error) as error:
        reason = error.message if isinstance(error, Error) else str(error)
    # Outside the handler, so that pytest does not show the exception as a cause.
    pytest.fail(f"@pytest.mark.{MARKER}: {reason}", pytrace=False)
