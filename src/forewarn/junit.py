"""JUnit XML, the format in which CI servers read test results. Standard library only."""

import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TestCase:
    """One result: failed with a `failure` message, skipped with a `skipped` one, else passed.

    `details` is the text below the failure message.
    """

    __test__ = False  # pytest would collect it by its name

    name: str
    classname: str
    failure: str = ""
    details: str = ""
    skipped: str = ""
    seconds: float | None = None


def render(suite_name: str, cases: Sequence[TestCase], seconds: float | None = None) -> bytes:
    """A test suite in a `testsuites` element. It took `seconds`; default: the sum of its cases."""
    total = sum(case.seconds or 0 for case in cases) if seconds is None else seconds
    root = xml.Element("testsuites")
    suite = xml.SubElement(
        root,
        "testsuite",
        name=printable(suite_name),
        tests=str(len(cases)),
        failures=str(sum(bool(case.failure) for case in cases)),
        skipped=str(sum(bool(case.skipped) for case in cases)),
        errors="0",
        time=f"{total:.3f}",
    )
    for case in cases:
        element = xml.SubElement(
            suite, "testcase", classname=printable(case.classname), name=printable(case.name)
        )
        if case.seconds is not None:
            element.set("time", f"{case.seconds:.3f}")
        if case.failure:
            failure = xml.SubElement(element, "failure", message=printable(case.failure))
            failure.text = printable(case.details)
        elif case.skipped:
            xml.SubElement(element, "skipped", message=printable(case.skipped))
    xml.indent(root)
    rendered: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return rendered


def printable(text: str) -> str:
    """XML cannot represent control characters, other than a tab or a newline."""
    return "".join(
        letter if letter.isprintable() or letter in "\t\n" else "\N{REPLACEMENT CHARACTER}"
        for letter in text
    )
