"""A report as a list of blocks, and the three ways to show it: Markdown, one self-contained HTML file, the terminal.

The page looks like that of `python -m gattn probe`: no script, nothing from outside, wide content scrolls in its box.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text as RichText

from gattn import page
from gattn.files import write_atomically


@dataclass(frozen=True)
class Link:
    """Words that lead to `target`: an escaped path from the report's folder, or `#` and an anchor in the report."""

    text: str
    target: str
    quiet: bool = False
    """Whether Markdown shows the words alone: nobody can read its source where every number is a link."""


Words = str | Link | tuple[str | Link, ...]


@dataclass(frozen=True)
class Heading:
    """1 is the report's title, 2 begins a section. Its anchor is `slug(text)`, as it is on GitHub."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    text: Words
    terminal: bool = False
    """Whether the terminal shows it too."""


@dataclass(frozen=True)
class Bullets:
    items: tuple[Words, ...]


@dataclass(frozen=True)
class Grid:
    """A table, the first column left-aligned; `short` is a narrower one, header first, for the terminal."""

    header: tuple[str, ...]
    rows: tuple[tuple[Words, ...], ...]
    short: tuple[tuple[str, ...], ...] = ()
    caption: str = ""
    """The page's name for it; without one the heading above is."""
    prose: tuple[int, ...] = ()
    """Columns of words, which are left-aligned and may be broken."""
    groups: tuple[tuple[str, int], ...] = ()
    """Where rows belong together, all of them: an anchor for each group and how many rows it has, which share their
    first cell."""


@dataclass(frozen=True)
class Image:
    name: str
    png: bytes
    alt: str
    """What a reader who cannot see it has to know; shown to others on demand."""
    caption: str
    width: int = 0
    """In pixels of 1/96 inch; 0: one for each of its own."""
    data: tuple[Grid, ...] = ()
    """What is drawn as numbers, on the page alone."""


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""


@dataclass(frozen=True)
class Details:
    """What few readers want, closed at first; not printed unless it was opened."""

    summary: str
    blocks: tuple[Block, ...]
    anchor: str = ""


Block = Heading | Text | Bullets | Grid | Image | Code | Details

CONTENTS_FROM = 3  # sections that need a table of contents
WIDE_FROM = 15  # columns that print small
WIDEST = 1000  # columns of characters of a table on the terminal

MORE = """
:root { --found: #fff3c4; } @media (prefers-color-scheme: dark) { :root { --found: #453c12; } }
.skip { position: absolute; top: -10rem; background: var(--paper); padding: .5rem; } .skip:focus { top: 0; }
body { max-width: 76rem; overflow-wrap: anywhere; } a { color: var(--mark); } p, ul { max-width: 44rem; }
ul { padding-left: 1.2rem; } li { margin: .25rem 0; } :focus-visible { outline: 2px solid var(--mark); }
caption { text-align: left; color: var(--soft); padding-bottom: .25rem; } :target { scroll-margin-top: 1rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: calc(100vw - 2rem); }
table a { color: inherit; text-decoration: underline dotted; text-underline-offset: .25em; }
th, td { vertical-align: baseline; overflow-wrap: normal; } thead th:first-child, tbody th, .prose { text-align: left; }
.whole { white-space: nowrap; } tbody th, .prose { white-space: normal; } .prose { overflow-wrap: anywhere; }
tbody th { min-width: 6.5rem; } .prose { min-width: 11rem; } .seed ~ .prose { min-width: 19rem; }
th.seed { position: static; min-width: 0; text-align: right; }
tbody:target { outline: 2px solid var(--mark); } tbody:target > tr > * { background: var(--found); }
figure { margin: 1.5rem 0; } figure .scroll { margin: 0; }
img { display: block; background: #fff; height: auto; width: min(var(--width), max(100%, 40rem)); }
summary { cursor: pointer; padding: .25rem 0; } details:target > summary { background: var(--found); }
code { font: .875em ui-monospace, monospace; } pre { font-size: .9375rem; white-space: pre-wrap; }
pre { border: 1px solid var(--line); padding: .75rem; margin: .5rem 0; }
@page { size: landscape; margin: 1cm; }
@media print {
  a, table a { color: inherit; text-decoration: none; } .skip, nav, details:not([open]) { display: none; }
  th, td { white-space: normal; } th:first-child { position: static; } thead { display: table-header-group; }
  .wide { font-size: 6pt; } .wide :is(th, td) { padding: .1rem; }
  .wide thead th { overflow-wrap: anywhere; min-width: 6.5ch; }
  tbody th { min-width: 4rem; } .prose, .seed ~ .prose { min-width: 6rem; }
  p, ul { max-width: none; } img { width: min(var(--width), 100%); max-height: 15cm; object-fit: contain; }
  tbody:target { outline: none; } tbody:target > tr > * { background: none; }
}
""".strip()
STYLE = f"{page.STYLE}\n{MORE}"


def plain(words: Words) -> str:
    """The words alone."""
    return "".join(part.text if isinstance(part, Link) else part for part in _parts(words))


def slug(text: str) -> str:
    """The anchor of a heading with this text, where no heading before has it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def save(folder: Path, stem: str, title: str, blocks: Sequence[Block]) -> list[str]:
    """Writes `<stem>.md`, `<stem>.html` and the pictures of the former; returns the files' names."""
    files = {block.name: block.png for block in blocks if isinstance(block, Image)}
    files[f"{stem}.md"] = markdown(blocks).encode(errors="replace")
    files[f"{stem}.html"] = html(title, blocks).encode()
    for name, content in files.items():
        write_atomically(folder / name, content)
    return list(files)


def terminal(blocks: Sequence[Block], console: Console) -> None:
    """Findings, the tables that have a short form, texts that ask for it, and the headings of all that."""
    waiting: list[Heading] = []
    for block in blocks:
        if isinstance(block, Heading):
            waiting = [heading for heading in waiting if heading.level < block.level] + [block] * (block.level <= 2)
        elif isinstance(block, Bullets) or getattr(block, "short", ()) or getattr(block, "terminal", False):
            for heading in waiting:
                console.print(RichText(f"\n{heading.text}", style="bold"))
            waiting = []
        match block:
            case Grid(short=(titles, *rows)):
                grid = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
                for index, title in enumerate(titles):
                    grid.add_column(
                        title, justify="right" if index else "left", no_wrap=index > 0, min_width=0 if index else 8
                    )
                for row in rows:
                    grid.add_row(*map(RichText, row))
                # As wide as it is, also on a narrower terminal: else the names, which may wrap, shrink to nothing.
                grid.width = Measurement.get(console, console.options.update(width=WIDEST), grid).maximum
                console.print(grid, soft_wrap=True)
            case Text(text, terminal=True):
                console.print(RichText(plain(text)))
            case Bullets(items):
                for item in items:
                    console.print(RichText(f"- {plain(item)}"))


# ---- Markdown ---------------------------------------------------------------------------------------------------


def markdown(blocks: Sequence[Block]) -> str:
    """GitHub-flavoured; images by the file name beside the report."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text):
            return _linked(text)
        case Bullets(items):
            return "\n".join(f"* {_linked(item)}" for item in items)
        case Grid():
            return _markdown_table(block)
        case Image(name, _, alt, caption):
            return f"![{alt}]({name})\n\n{caption}"
        case Code(text, language):
            return f"```{language}\n{text}\n```"
        case Details(summary, inner, anchor):
            head = f"<details{_id(anchor)}>\n<summary>{escape(summary)}</summary>"
            return "\n\n".join([head, *map(_markdown, inner), "</details>"])


def _markdown_table(grid: Grid) -> str:
    ruler = ["---", *("---" if i in grid.prose else "---:" for i in range(1, len(grid.header)))]
    lines = [[_cell(_linked(cell)) for cell in row] for row in grid.rows]
    for anchor, first, _ in _groups(grid):
        lines[first][0] = f"<a{_id(anchor)}></a>{lines[first][0]}"
    return "\n".join("| " + " | ".join(line) + " |" for line in ([*map(_cell, grid.header)], ruler, *lines))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _linked(words: Words) -> str:
    def one(part: str | Link) -> str:
        if isinstance(part, str) or part.quiet:
            return plain(part)
        text = part.text.replace("[", "\\[").replace("]", "\\]")
        return f"[{text}]({part.target})"

    return "".join(map(one, _parts(words)))


# ---- HTML -------------------------------------------------------------------------------------------------------


def html(title: str, blocks: Sequence[Block]) -> str:
    """One file without any reference to files but those of its links.

    The level-1 heading and the texts that follow it are the page's header; with several sections there are contents.
    """
    anchors = _anchors(blocks)
    placed = list(zip(blocks, anchors, strict=True))
    texts = takewhile(lambda block: isinstance(block, Text), blocks[1:])
    top = 1 + len(list(texts)) if isinstance(blocks[0], Heading) and blocks[0].level == 1 else 0
    head = "\n".join(_html(*one) for one in placed[:top])
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">To the content</a>\n'
        f"<header>\n{head}\n</header>\n{_contents(placed)}"
        f'<main id="content">\n{_sections(placed[top:])}\n</main>\n</body>\n</html>\n'
    )


def _anchors(blocks: Iterable[Block]) -> list[str]:
    """For each block that of its heading: as GitHub makes them, a repeated one with a number."""
    out, seen = [], {"content": 0}
    for block in blocks:
        if isinstance(block, Heading):
            name = slug(block.text)
            count = seen[name] = seen.get(name, -1) + 1
            out.append(f"{name}-{count}" if count else name)
        else:
            out.append(out[-1] if out else "")
    return out


def _contents(placed: Sequence[tuple[Block, str]]) -> str:
    sections = [(block.text, anchor) for block, anchor in placed if isinstance(block, Heading) and block.level == 2]
    if len(sections) < CONTENTS_FROM:
        return ""
    items = "\n".join(f'<li><a href="#{_escape(anchor)}">{_escape(text)}</a></li>' for text, anchor in sections)
    return f'<nav aria-label="Contents">\n<ul>\n{items}\n</ul>\n</nav>\n'


def _sections(placed: Sequence[tuple[Block, str]]) -> str:
    parts, opened = [], False
    for block, anchor in placed:
        if isinstance(block, Heading) and block.level == 2:
            parts += ["</section>"] * opened + [f'<section aria-labelledby="{_escape(anchor)}">']
            opened = True
        parts.append(_html(block, anchor))
    return "\n".join(parts + ["</section>"] * opened)


def _html(block: Block, anchor: str) -> str:
    """`anchor`: of the heading that the block is or stands under."""
    match block:
        case Heading(level, text):
            return f"<h{level}{_id(anchor)}>{_escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{_anchored(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{_anchored(item)}</li>" for item in items) + "\n</ul>"
        case Grid():
            return _table(block, anchor)
        case Image():
            return _figure(block, anchor)
        case Code(text):
            return f"<pre><code>{_escape(text)}</code></pre>"
        case Details(summary, inner, own):
            return _details(summary, "\n".join(_html(one, anchor) for one in inner), own)


def _figure(image: Image, anchor: str) -> str:
    width, height = struct.unpack(">II", image.png[16:24])
    source = f"data:image/png;base64,{base64.b64encode(image.png).decode()}"
    picture = (
        f'<img src="{source}" alt="{_escape(image.alt)}" width="{width}" height="{height}" '
        f'style="--width: {image.width or width}px">'
    )
    said = [f"<p>{_escape(image.alt)}</p>", *(_table(grid, anchor) for grid in image.data)]
    words = "In words and numbers" if image.data else "In words"
    return (
        f"<figure>\n{_box(picture, f'Picture: {image.caption}')}\n<figcaption>{_escape(image.caption)}</figcaption>\n"
        f"{_details(words, chr(10).join(said))}\n</figure>"
    )


def _table(grid: Grid, anchor: str) -> str:
    titles = (f'<th scope="col"{_kind(grid, i)}>{_title(cell)}</th>' for i, cell in enumerate(grid.header))
    if grid.groups:
        bodies = [
            f"<tbody{_id(name)}>\n" + "\n".join(_group(grid, first, count)) + "\n</tbody>"
            for name, first, count in _groups(grid)
        ]
    else:
        lines = (f'<tr><th scope="row">{_anchored(row[0])}</th>{_cells(grid, row, 1)}</tr>' for row in grid.rows)
        bodies = ["<tbody>\n" + "\n".join(lines) + "\n</tbody>"]
    name = f"<caption><span>{_escape(grid.caption)}</span></caption>\n" if grid.caption else ""
    label = "" if grid.caption else f' aria-labelledby="{_escape(anchor)}"'
    wide = ' class="wide"' if len(grid.header) >= WIDE_FROM else ""
    whole = (
        f"<table{wide}{label}>\n{name}<thead><tr>{''.join(titles)}</tr></thead>\n" + "\n".join(bodies) + "\n</table>"
    )
    return _box(whole, f"Table: {grid.caption}" if grid.caption else "Table")


def _title(text: str) -> str:
    """Broken between words, not at their hyphens."""
    return re.sub(r"\S*-\S*", r'<span class="whole">\g<0></span>', _escape(text))


def _group(grid: Grid, first: int, count: int) -> Iterable[str]:
    """Rows that share their first cell and are told apart by their second."""
    for place, row in enumerate(grid.rows[first : first + count]):
        shared = "" if place else f'<th scope="rowgroup" rowspan="{count}">{_anchored(row[0])}</th>'
        yield f'<tr>{shared}<th scope="row" class="seed">{_anchored(row[1])}</th>{_cells(grid, row, 2)}</tr>'


def _groups(grid: Grid) -> Iterable[tuple[str, int, int]]:
    """Anchor, first row and count of each group."""
    first = 0
    for anchor, count in grid.groups:
        yield anchor, first, count
        first += count


def _cells(grid: Grid, row: Sequence[Words], start: int) -> str:
    return "".join(f"<td{_kind(grid, i)}>{_anchored(cell)}</td>" for i, cell in enumerate(row) if i >= start)


def _kind(grid: Grid, column: int) -> str:
    return ' class="prose"' if column in grid.prose else ""


def _box(inner: str, label: str) -> str:
    """Scrolls by itself; a keyboard can reach it to do so."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{_escape(label)}">\n{inner}\n</div>'


def _details(summary: str, inner: str, anchor: str = "") -> str:
    return f"<details{_id(anchor)}>\n<summary>{_escape(summary)}</summary>\n{inner}\n</details>"


def _anchored(words: Words) -> str:
    return "".join(
        f'<a href="{_escape(part.target)}">{_spoken(part.text)}</a>' if isinstance(part, Link) else _spoken(part)
        for part in _parts(words)
    )


def _spoken(text: str) -> str:
    """Escaped; what stands between backticks, as in Markdown, is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", _escape(text))


def _parts(words: Words) -> tuple[str | Link, ...]:
    return words if isinstance(words, tuple) else (words,)


def _id(anchor: str) -> str:
    return f' id="{_escape(anchor)}"' if anchor else ""


def _escape(text: str) -> str:
    """For an element or an attribute; what cannot be printed (control, bidirectional) becomes U+FFFD."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))
