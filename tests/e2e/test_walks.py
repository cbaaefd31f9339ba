"""Two pages begin with a walk; here they are walked."""

from pathlib import Path

import pytest

from tests.e2e.walk import ROOT, matches, walk


@pytest.mark.system
def test_the_five_minutes_of_the_labs_page_go_as_it_says(tmp_path: Path) -> None:
    assert walk(ROOT / "docs/lab.md", tmp_path, "Five minutes") == 14


@pytest.mark.system
def test_the_operators_walk_with_four_hosts_goes_as_its_page_says(tmp_path: Path) -> None:
    assert walk(ROOT / "docs/operate.md", tmp_path, "A walk with four hosts") == 22


def test_a_page_that_promises_something_else_is_found_out() -> None:
    assert matches("a … c\n", "a b c\n")
    assert not matches("a … c\n", "a b d\n")
    assert not matches("", "something\n")
