"""How the suite is divided and run:

`make test` is what needs Python alone, `make test-all` also what is marked `system`.
"""

import os
from pathlib import Path

import pytest

import tests.azure_guard  # noqa: F401

PYTHON_ONLY = "not system"
# As in `forewarn.store.open`: tests in one process import gRPC in any order, and start commands.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
WORKERS_PER_CORE = 3
"""Most tests wait for a process, a socket or a limit for more than half of their time."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The tests of libvirt import it, so without it they cannot even be deselected."""
    return (
        True
        if config.option.markexpr == PYTHON_ONLY and collection_path.name.startswith("test_libvirt")
        else None
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have measured: they cannot, because their workers have no terminal."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(str(value))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` stands for."""
    return WORKERS_PER_CORE * len(os.sched_getaffinity(0))
