"""The threat model in docs/security.md stands on tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}::{name}" for file, name in NAMED])
def test_every_test_that_the_threat_model_names_exists(file: str, name: str) -> None:
    """A threat that no test shows any more is a promise that nobody keeps."""
    defined = [
        one.name
        for one in ast.parse((ROOT / file).read_text()).body
        if isinstance(one, ast.FunctionDef)
    ]

    assert name in defined


def test_the_threat_model_names_its_tests_in_the_one_form_that_is_checked() -> None:
    """A path without a test, or with a space in it, would be passed over in silence."""
    assert len(NAMED) > 30
    assert (
        PAGE.count("tests/")
        == PAGE.count("::test_")
        == len(re.findall(r"`tests/[\w/]+\.py::test_\w+`", PAGE))
    )
