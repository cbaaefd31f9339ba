"""The tests that docs/security.md names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}::{name}" for file, name in NAMED])
def test_named_test_exists(file: str, name: str) -> None:
    """A threat without its test is a promise that nobody keeps."""
    defined = [
        node.name
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert name in defined


def test_tests_are_named_in_the_form_that_is_checked() -> None:
    """A path without a test, or with a space in it, would be skipped silently."""
    assert len(NAMED) > 30
    assert (
        PAGE.count("tests/")
        == PAGE.count("::test_")
        == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", PAGE))
    )
