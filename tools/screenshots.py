"""Take the screenshots for docs/images, light and dark: of the console of a lab after a busy day,
and of the report of a scenario that fails.

python -m tools.screenshots [--phone] [--full] [FOLDER [VIEW...]]
"""

import asyncio
import shutil
import sys
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

from forewarn.lab.scenario.html_report import render_html
from forewarn.lab.scenario.report import Console
from forewarn.lab.scenario.runner import RunOptions, run
from forewarn.lab.scenario.schema import parse_scenario
from forewarn.lab.service import LabService
from tests.e2e.busy_lab import event_of, open_busy_lab

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SCENARIO = Path(__file__).parent / "report.yaml"
WIDE = (1280, 800)
PHONE = (390, 844)


def list_views(lab: LabService) -> dict[str, str]:
    campaign = lab.service.campaigns.all()[0]
    return {
        "now": "#/",
        "timeline": "#/",
        "fleet": "#/fleet",
        "vm": "#/vms/web-0",
        "hosts": "#/hosts",
        "host": "#/hosts/kvm-05",
        "event": f"#/events/{event_of(lab, 'db-1')}",
        "campaigns": "#/campaigns",
        "campaign": f"#/campaigns/{campaign.id}",
        "plan": "#/campaigns/new",
        "history": "#/history",
        "lab": "#/lab",
    }


IN_DOCS = ("now", "timeline", "fleet", "host", "event", "campaign", "history", "lab")


async def shoot(
    browser: Browser, url: str, lab: LabService, folder: Path, names: list[str]
) -> None:
    sizes = {"": WIDE, "-phone": PHONE} if "--phone" in sys.argv else {"": WIDE}
    for scheme in ("light", "dark"):
        for suffix, (width, height) in sizes.items():
            page = await browser.new_page(
                color_scheme=scheme,  # type: ignore[arg-type]
                viewport={"width": width, "height": height},
                timezone_id="UTC",
                locale="en-GB",
            )
            page.on("console", lambda message: print("console:", message.type, message.text))
            page.on("pageerror", lambda error: print("error:", error))
            for name, address in list_views(lab).items():
                if name not in names:
                    continue
                await page.goto(f"{url}/{address}")
                await page.wait_for_selector("main[data-ready]")
                await page.wait_for_selector("text=Live")
                await prepare(page, name)
                path = folder / f"{name}-{scheme}{suffix}.png"
                await page.screenshot(path=path, full_page="--full" in sys.argv)
            await page.close()


async def shoot_report(browser: Browser, folder: Path) -> None:
    scenario = parse_scenario(SCENARIO.read_bytes(), SCENARIO.name)
    console = Console(lambda line: None)
    result = await run(scenario, RunOptions(), console)
    for scheme in ("light", "dark"):
        page = await browser.new_page(
            color_scheme=scheme,  # type: ignore[arg-type]
            viewport={"width": WIDE[0], "height": WIDE[1]},
        )
        await page.set_content(render_html(scenario, result, console).decode())
        await page.screenshot(path=folder / f"report-{scheme}.png", full_page=True)
        await page.close()


async def prepare(page: Page, name: str) -> None:
    if name == "plan":
        await page.fill("#hosts", "kvm-0[1-4]")
        await page.click("button[type=submit]")
        await page.wait_for_selector(".waves")
    if name == "timeline":
        await page.locator(".timeline").evaluate("each => each.scrollIntoView({block: 'end'})")
        await page.locator("a.bar.impact").first.hover()


async def main() -> None:
    arguments = [each for each in sys.argv[1:] if not each.startswith("--")]
    folder, names = (
        Path(arguments[0]) if arguments else IMAGES,
        arguments[1:] or [*IN_DOCS, "report"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    async with open_busy_lab() as (lab, url), async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"))
        await shoot(browser, url, lab, folder, names)
        if "report" in names:
            await shoot_report(browser, folder)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
