"""The HTML report: everything that matters is in it, and nothing in it can be executed."""

from html.parser import HTMLParser

from forewarn.lab.scenario.html_report import LANES_MAX, POSITIONS, render_html
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.schema import Scenario
from tests.unit.lab.scenario.small_scenarios import WEB, play, scene

HOSTILE = "</title></pre><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
RESTART = {"at": "10m", "do": "restart", "vm": "web-0", "as": "restart"}
BUSY = scene(
    RESTART,
    {"at": "11m", "do": "log", "text": HOSTILE},
    {"at": "50m", "do": "log", "text": "late"},
    about=HOSTILE,
    scopes=[WEB],
    guests=[{"approve": "20s"}],
    faults=[
        {"fault": "status", "code": 500, "vms": ["web-0"], "from": "10m", "for": "10s"},
        {"fault": "status", "code": 429, "method": "POST", "from": "10m15s", "for": "30s"},
    ],
    expectations=[
        {"expect": "approval", "of": "restart", "by": "web-0", "within": "60s"},
        {"expect": "approval", "of": "restart", "by": "web-1", "within": "2m"},
    ],
)


class Page(HTMLParser):
    """The start tags of a page, their attributes, and how often each class occurs."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        console = Console(lambda line: None)
        self.html = render_html(scenario, play(scenario, console), console).decode()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.classes: list[str] = []
        self.text = ""
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self.classes += [
            word for name, value in attrs if name == "class" for word in str(value).split()
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_report_loads_and_executes_nothing() -> None:
    """It is attached to pull requests, and names in it come from anywhere."""
    page = Page(BUSY)

    assert set(page.tags).isdisjoint({"script", "img", "link", "iframe", "a", "object", "form"})
    assert not {
        name for name in page.attributes if name.startswith("on") or name in ("src", "href")
    }
    assert "default-src 'none'" in page.html
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_hostile_text_is_shown_as_text() -> None:
    page = Page(BUSY)

    assert page.text.count(HOSTILE) >= 2
    assert "<script" not in page.html


def test_control_characters_are_replaced() -> None:
    page = Page(scene({"at": "1m", "do": "log", "text": "a\x1b[31mb"}))

    assert "\x1b" not in page.html
    assert "a\N{REPLACEMENT CHARACTER}[31mb" in page.text


def test_timeline_has_a_lane_per_vm_with_what_happened() -> None:
    page = Page(BUSY)

    assert page.classes.count("lane") == 3  # the steps, web-0, web-1
    assert {"notice", "impact", "fault", "poll", "bad", "approval", "refused", "step"} <= set(
        page.classes
    )


def test_verdicts_say_what_happened() -> None:
    page = Page(BUSY)

    assert "passed web-0 approves restart within 60s" in page.text
    assert "approvals got 429 from the fault `status`" in page.text
    assert "failed web-1 approves restart within 2m" in page.text
    assert "not reached step 3 (log)" in page.text


def test_size_does_not_grow_with_the_number_of_polls() -> None:
    """A run may see millions of polls; what is closer together than a mark is one mark."""
    page = Page(
        scene(
            until="2h",
            scopes=[{"name": "db", "vms": [{"name": "db-0"}]}],
            faults=[{"fault": "status", "code": 500}],
        )
    )

    assert "7200 polls" in page.text
    assert POSITIONS / 2 < page.classes.count("bad") <= POSITIONS + 2  # and the legend


def test_large_fleet_shows_the_busy_vms_first() -> None:
    vms = [{"name": f"vm-{number:03}"} for number in range(LANES_MAX + 5)]
    steps = [{**RESTART, "vm": "vm-104"}]
    page = Page(
        scene(*steps, until="11m", scopes=[{"name": "big", "kind": "scale-set", "vms": vms}])
    )

    assert page.text.index("vm-104") < page.text.index("vm-000")
    assert "5 more VMs" in page.text


def test_run_of_no_length_can_be_drawn() -> None:
    assert "test" in Page(scene(until="0s")).text
