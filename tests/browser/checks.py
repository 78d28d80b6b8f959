"""What is wrong with an HTML page, as Chromium shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.browser.chromium import Browser, Page, Screen

AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")

DESKTOP, PHONE = Screen("desktop", 1280, 800), Screen("phone", 390, 844, mobile=True)
DARK = Screen("dark", 1280, 800, dark=True)
# Letter in landscape with margins of 1 cm, the narrower of the two usual papers; mobile: without a scroll bar.
PAPER = Screen("paper", 980, 740, mobile=True, media="print")
SCREENS = (DESKTOP, PHONE, DARK, PAPER)


def problems(browser: Browser, path: Path, screen: Screen, place: str = "") -> list[str]:
    """Sentences: what the page logs, loads, shows wrongly or does not say; empty for a page as it should be.

    `place`: of the page, `#` and an anchor, as if a link had led there.
    """
    page = Page(browser, path.resolve().as_uri() + place, screen)
    try:
        setting = json.dumps({"width": screen.width, "paper": screen.media == "print"})
        found = page.value(f"({AUDIT.strip()})({setting})")
        return [*_events(page.happened(), page.url.removesuffix(place)), *found]
    finally:
        page.close()


def print_problems(browser: Browser, path: Path) -> list[str]:
    """Whether it prints, and something readable."""
    page = Page(browser, path.resolve().as_uri(), DESKTOP)
    try:
        pdf = page.pdf()
    finally:
        page.close()
    if not pdf.startswith(b"%PDF-") or not re.search(rb"/Type\s*/Page\b", pdf):
        return ["no PDF"]
    return [] if re.search(rb"/Type\s*/Font\b", pdf) else ["a PDF without text"]


def _events(events: Iterable[dict[str, Any]], url: str) -> Iterable[str]:
    for event in events:
        found = event["params"]
        match event["method"]:
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "assert", "warning"):
                yield f"console {found['type']}: {[argument.get('value') for argument in found['args']]}"
            case "Runtime.exceptionThrown":
                yield f"exception: {found['exceptionDetails']['text']}"
            case "Log.entryAdded" if found["entry"]["level"] == "error":
                yield f"logged error: {found['entry']['text']}"
            case "Network.loadingFailed":
                yield f"request failed: {found['errorText']}"
            case "Network.responseReceived" if found["response"]["status"] >= 400:
                yield f"request failed: {found['response']['status']} {found['response']['url']}"
            case "Network.requestWillBeSent" if not found["request"]["url"].startswith(("data:", url)):
                yield f"asks for another file: {found['request']['url']}"
