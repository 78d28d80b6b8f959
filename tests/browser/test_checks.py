"""Every check of a page sees what it is there to see: a good page passes, and each fault is named."""

import pytest

from tests.browser.checks import DARK, DESKTOP, PAPER, PHONE, SCREENS, print_problems, problems

PNG = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
GOOD = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>A page</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ background: #fff; color: #222; }} .scroll {{ overflow-x: auto; }} .wide {{ width: 2000px; }}
@media print {{ .scroll {{ overflow: visible; }} .scroll .wide {{ width: auto; }} }}</style></head>
<body><h1>A page</h1><p>Text, <a href="#end">a link</a>.</p>
<div class="scroll" tabindex="0"><div class="wide">wide</div></div>
<table><caption>Numbers</caption><tr><td>1</td></tr></table>
<img src="{PNG}" alt="A dot.">
<svg role="img" aria-label="Nothing." width="10" height="10"></svg>
<details><summary>More</summary><p>Hidden at first.</p></details>
<p id="end">The end.</p></body></html>
"""


@pytest.fixture
def page(tmp_path):
    """Writes a page and returns where."""

    def write(text):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("screen", SCREENS, ids=lambda screen: screen.name)
def test_a_good_page_has_no_problems(browser, page, screen):
    assert problems(browser, page(GOOD), screen) == []


def test_a_good_page_prints(browser, page):
    assert print_problems(browser, page(GOOD)) == []


END = '<p id="end">'
FAULTS = {
    "console error": (DESKTOP, END, f"<script>console.error('no!')</script>{END}", "console error: ['no!']"),
    "exception": (DESKTOP, END, f"<script>throw new Error('no!')</script>{END}", "exception"),
    "missing file": (DESKTOP, "<svg", '<img src="none.png" alt="None."><svg', "request failed"),
    "missing picture": (DESKTOP, "<svg", '<img src="none.png" alt="None."><svg', "does not load"),
    "another file": (DESKTOP, "<svg", '<img src="other.svg" alt="A."><svg', "asks for another file"),
    "another host": (DESKTOP, "</title>", '</title><link rel="stylesheet" href="http://127.0.0.1:9/a.css">', "another"),
    "broken picture": (DESKTOP, "iVBORw0", "aaaaaa0", "does not load"),
    "wide on a desktop": (DESKTOP, END, f'<div class="wide">wide</div>{END}', "scrolls horizontally: 20"),
    "wide on a phone": (PHONE, END, f'<div class="wide">wide</div>{END}', "scrolls horizontally: 20"),
    "slightly wide on a phone": (PHONE, END, f'<div style="width: 400px">wide</div>{END}', "scrolls horizontally"),
    "wide and cut": (
        PHONE,
        END,
        f'<style>body {{ overflow-x: hidden }}</style><p class="wide">a</p>{END}',
        "sticks out",
    ),
    "wide in details": (PHONE, "<p>Hidden", '<p class="wide">Hidden', "scrolls horizontally"),
    "no viewport": (PHONE, 'name="viewport"', 'name="other"', "no viewport meta"),
    "out of reach": (PHONE, ' tabindex="0"', "", "not for a keyboard"),
    "cut on paper": (PAPER, ".scroll .wide { width: auto; }", ".scroll { overflow: hidden; }", "is cut off"),
    "no alt": (DESKTOP, ' alt="A dot."', "", "picture without a text alternative"),
    "blank alt": (DESKTOP, "A dot.", " ", "picture without a text alternative"),
    "no label": (DESKTOP, ' aria-label="Nothing."', "", "drawing without a text alternative"),
    "no caption": (DESKTOP, "<caption>Numbers</caption>", "", "table without a caption"),
    "blank caption": (DESKTOP, "<caption>Numbers", "<caption>", "table without a caption"),
    "no h1": (DESKTOP, "<h1>A page</h1>", "", "0 h1"),
    "two h1": (DESKTOP, "<h1>", "<h1>One more</h1><h1>", "2 h1"),
    "no language": (DESKTOP, ' lang="en"', "", "no language"),
    "no title": (DESKTOP, "<title>A page", "<title>", "no title"),
    "link to nowhere": (DESKTOP, 'id="end"', 'id="other"', "link to nowhere"),
    "link without words": (DESKTOP, "a link", "", "link without words"),
    "the same id": (DESKTOP, "<h1>", '<h1 id="end">', "id given twice"),
    "small text": (PHONE, END, '<p id="end" style="font-size: 11px">', "text below 12 px"),
    "small text in details": (PHONE, "<p>Hidden", '<p style="font-size: 11px">Hidden', "text below 12 px"),
    "pale text": (DESKTOP, END, '<p id="end" style="color: #888">', "contrast below 4.5"),
    "dark on dark": (
        DARK,
        "</style>",
        "@media (prefers-color-scheme: dark) { body { background: #333 } }</style>",
        "4.5",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(browser, page, tmp_path, fault):
    screen, good, bad, says = FAULTS[fault]
    (tmp_path / "other.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>')
    assert good in GOOD
    found = problems(browser, page(GOOD.replace(good, bad)), screen)
    assert [text for text in found if says in text], found


def test_a_page_that_prints_nothing_is_seen(browser, page):
    blank = GOOD.replace("@media print {", "@media print { body { display: none; }")
    assert print_problems(browser, page(blank)) == ["a PDF without text"]
