"""Blocks say the same in Markdown, on the page and on the terminal, and no text of theirs becomes markup."""

import io
import re

import matplotlib.figure
import pytest
from rich.console import Console

from experiments import render
from experiments.render import Bullets, Code, Details, Grid, Heading, Image, Link, Text
from tests.test_page import NASTY
from tests.test_report import elements

LINK = Link("word", "../a%20folder/")


def drawn() -> bytes:
    buffer = io.BytesIO()
    matplotlib.figure.Figure(figsize=(2, 1)).savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def test_words_are_the_same_in_all_three_forms():
    words = ("before ", LINK, " after")
    blocks = [Text(words, terminal=True), Bullets((words, "plain")), Grid(("a", "b"), (("x", words),))]
    screen = io.StringIO()
    render.terminal(blocks, Console(file=screen, width=80))
    assert screen.getvalue() == "before word after\n- before word after\n- plain\n"
    assert render.markdown(blocks).count("before [word](../a%20folder/) after") == 3
    assert render.html("t", blocks).count('before <a href="../a%20folder/">word</a> after') == 3
    assert render.plain(words) == "before word after"


def test_a_narrow_terminal_keeps_the_names_of_rows():
    rows = (("variant", *["0.123 (0.100-0.150)"] * 5),)
    screen = io.StringIO()
    grid = Grid(("name", *"abcde"), rows, short=(("name", *"abcde"), *rows))
    render.terminal([grid], Console(file=screen, width=80))
    assert "variant" in screen.getvalue()


def test_the_terminal_has_no_heading_of_what_it_leaves_out():
    said, unsaid = Text("said", terminal=True), Text("unsaid")
    grid = Grid(("a",), (("1",),), short=(("a",), ("1",)))
    blocks = [Heading(1, "Top"), Heading(2, "One"), unsaid, said, Heading(3, "Three"), Heading(2, "Two"), unsaid]
    blocks += [
        Heading(2, "Four"),
        Heading(3, "Five"),
        Bullets(("x",)),
        Heading(2, "Six"),
        grid,
        said,
        Heading(2, "End"),
    ]
    screen = io.StringIO()
    render.terminal(blocks, Console(file=screen, width=80))
    assert " ".join(screen.getvalue().split()) == "Top One said Four - x Six a 1 said"


def test_a_quiet_link_is_one_on_the_page_alone():
    blocks = [Text(Link("12", "#there", quiet=True))]
    assert render.markdown(blocks) == "12\n"
    assert '<a href="#there">12</a>' in render.html("t", blocks)


def test_code_is_written_as_in_markdown():
    blocks = [Text(("the model `a<b`, ", Link("`train`", "#x"))), Text("`"), Text("``")]
    assert render.markdown(blocks).startswith("the model `a<b`, [`train`](#x)")
    page = render.html("t", blocks)
    assert '<p>the model <code>a&lt;b</code>, <a href="#x"><code>train</code></a></p>' in page
    assert "<p>`</p>\n<p>``</p>" in page


def test_no_text_becomes_markup():
    """Nor ends the attribute or the block of code that it is in; what cannot be encoded is replaced."""
    nasty = "".join(NASTY) + "]|`"
    grid = Grid((nasty, nasty), ((nasty, Link(nasty, "#x")),), caption=nasty)
    image = Image("a.png", drawn(), nasty, nasty, data=(grid,))
    blocks = (Text(nasty), Bullets((nasty,)), grid, image, Code(nasty), Details(nasty, (Text(nasty),), "x"))
    page = render.html(nasty, [Heading(1, nasty), Heading(2, nasty), *blocks])
    page.encode()
    plain = render.html("t", [Heading(1, "t"), Heading(2, "t"), *_named(blocks)])
    assert [tag for tag, _, _ in elements(page)] == [tag for tag, _, _ in elements(plain)]
    assert not [name for _, found, _ in elements(page) for name in found if name.startswith("on")]
    assert all(c.isprintable() or c == "\n" for c in page)


def _named(blocks):
    """The same blocks with a harmless word for every text."""
    _, _, grid, image, _, _ = blocks
    grid = Grid(("t", "t"), (("t", Link("t", "#x")),), caption="t")
    image = Image("a.png", image.png, "t", "t", data=(grid,))
    return [Text("t"), Bullets(("t",)), grid, image, Code("t"), Details("t", (Text("t"),), "x")]


def test_equal_headings_have_anchors_of_their_own_and_contents_name_every_section():
    blocks = [Heading(1, "Top"), Heading(2, "Same: one"), Heading(3, "Same: one"), Heading(2, "Same: one")]
    blocks += [Heading(2, "Content")]
    found = elements(render.html("t", blocks))
    anchors = [attributes["id"] for tag, attributes, _ in found if tag in ("h2", "h3")]
    assert anchors == ["same-one", "same-one-1", "same-one-2", "content-1"], "main is called content"
    links = [attributes["href"] for tag, attributes, _ in found if tag == "a"]
    assert links == ["#content", "#same-one", "#same-one-2", "#content-1"]
    assert len({attributes["id"] for _, attributes, _ in found if "id" in attributes}) == 6
    assert "<nav" not in render.html("t", blocks[:3]), "a page of one section needs no contents"


def test_the_title_and_the_texts_below_it_are_the_header_and_sections_hold_the_rest():
    blocks = [
        Heading(1, "Top"),
        Text("Intro."),
        Heading(2, "First"),
        Text("Inside."),
        Heading(2, "Second"),
        Text("Too."),
    ]
    found = {}
    for tag, _, text in elements(render.html("t", blocks)):
        found.setdefault(tag, []).append(text.split())
    assert found["header"] == [["Top", "Intro."]]
    assert found["main"] == [["First", "Inside.", "Second", "Too."]]
    assert found["section"] == [["First", "Inside."], ["Second", "Too."]]
    without = {tag: text for tag, _, text in elements(render.html("t", [Text("Alone.")]))}
    assert (without["header"].strip(), without["main"].strip()) == ("", "Alone.")


def test_rows_of_a_group_share_their_first_cell_and_its_anchor():
    rows = (("a", "0", "1"), ("a", "1", "2"), ("b", "0", "3"))
    grid = Grid(("row", "seed", "n"), rows, caption="Runs", groups=(("of-a", 2), ("of-b", 1)))
    page = render.html("t", [grid])
    bodies = re.findall(r'<tbody id="(.*?)">(.*?)</tbody>', page, flags=re.DOTALL)
    assert [(name, body.count("<tr>"), re.findall(r'rowspan="(\d)">(.)<', body)) for name, body in bodies] == [
        ("of-a", 2, [("2", "a")]),
        ("of-b", 1, [("1", "b")]),
    ]
    assert re.findall(r'<a id="(.*?)"></a>(.) \| 0', render.markdown([grid])) == [("of-a", "a"), ("of-b", "b")]


def test_every_table_has_a_name():
    """Its caption, or else the heading above it."""
    bare, named = Grid(("a", "b"), (("1", "2"),)), Grid(("a", "b"), (("1", "2"),), caption="Numbers")
    page = render.html("t", [Heading(1, "Top"), Heading(2, "Above"), bare, named])
    tables = [
        (attributes.get("aria-labelledby"), "Numbers" in text)
        for tag, attributes, text in elements(page)
        if tag == "table"
    ]
    assert tables == [("above", False), (None, True)]


@pytest.mark.parametrize("width", [0, 192])
def test_a_picture_says_what_it_shows_twice_and_its_numbers_where_there_are_some(width):
    grid = Grid(("layer", "a"), (("1", "0.5"),), caption="By layer")
    image = Image("a.png", drawn(), "A line that rises.", "Attention.", width, (grid,))
    page = render.html("t", [image])
    (figure,) = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    (picture,) = [found for tag, found, _ in elements(figure) if tag == "img"]
    assert (picture["alt"], picture["width"], picture["height"]) == ("A line that rises.", "200", "100")
    assert picture["style"] == f"--width: {width or 200}px"
    texts = {tag: text for tag, _, text in elements(figure)}
    assert texts["figcaption"] == "Attention."
    assert "A line that rises." in texts["details"]
    assert "0.5" in texts["details"]
    assert render.markdown([image]) == "![A line that rises.](a.png)\n\nAttention.\n"


def test_what_is_saved_is_complete(tmp_path):
    image = Image("a.png", drawn(), "A picture.", "A caption.")
    blocks = [Heading(1, "Top"), image, Details("More", (Code("{}", "json"),), "more"), Text("\udcff")]
    assert sorted(render.save(tmp_path, "page", "Top", blocks)) == ["a.png", "page.html", "page.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "page.html", "page.md"]
    assert (tmp_path / "a.png").read_bytes() == image.png
    markdown = (tmp_path / "page.md").read_text()
    assert '<details id="more">\n<summary>More</summary>\n\n```json\n{}\n```\n\n</details>' in markdown
