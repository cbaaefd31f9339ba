"""JUnit XML as CI servers read it."""

import xml.etree.ElementTree as xml

from forewarn.junit import TestCase, render


def test_suite_counts_failed_and_skipped_cases() -> None:
    cases = [
        TestCase(name="a", classname="x", seconds=0.5),
        TestCase(name="b", classname="x", failure="no", details="line 1\nline 2"),
        TestCase(name="c", classname="x", skipped="later"),
    ]
    (suite,) = xml.fromstring(render("all", cases)).findall("testsuite")  # noqa: S314
    counts = [suite.get(name) for name in ("name", "tests", "failures", "skipped", "errors")]
    first, second, third = suite.findall("testcase")

    assert counts == ["all", "3", "1", "1", "0"]
    assert (first.get("time"), list(first)) == ("0.500", [])
    assert [(element.tag, element.text) for element in second] == [("failure", "line 1\nline 2")]
    assert [element.get("message") for element in third] == ["later"]


def test_control_characters_are_replaced() -> None:
    """XML cannot represent them, and a program under test may print anything."""
    rendered = render("\x00", [TestCase(name="\x1b[1m", classname="x", failure="\x07<&")])
    case = xml.fromstring(rendered).find(".//testcase")  # noqa: S314

    assert case is not None
    assert case.get("name") == "\N{REPLACEMENT CHARACTER}[1m"
    assert case[0].get("message") == "\N{REPLACEMENT CHARACTER}<&"
