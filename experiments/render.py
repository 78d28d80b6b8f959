"""A report as a list of blocks, and the three ways to show it: Markdown, one self-contained HTML file, the terminal."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Text:
    text: str
    terminal: bool = False
    """Whether the terminal shows it too."""


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A table of strings, the first column left-aligned; `short` is a narrower one, header first, for the terminal."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    short: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Image:
    name: str
    png: bytes
    alt: str
    caption: str


Block = Heading | Text | Bullets | Grid | Image

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
h3 { font-size: 1rem; margin-top: 1.5rem; } p, ul { max-width: 45rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; } th:first-child, td:first-child { text-align: left; }
td { font-variant-numeric: tabular-nums; } td:nth-child(2):last-child { text-align: left; white-space: normal; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { font-size: .875rem; color: #444; }
""".strip()


def markdown(blocks: Sequence[Block]) -> str:
    """GitHub-flavoured; images by the file name beside the report."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def html(title: str, blocks: Sequence[Block]) -> str:
    """One file without any reference to another: pictures are embedded, wide tables scroll by themselves."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def terminal(blocks: Sequence[Block], console: Console) -> None:
    """Headings, the tables that have a short form, and findings."""
    for block in blocks:
        match block:
            case Heading(1 | 2, text):
                console.print(RichText(f"\n{text}", style="bold"))
            case Grid(short=(titles, *rows)):
                grid = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
                for index, title in enumerate(titles):
                    grid.add_column(title, justify="right" if index else "left", no_wrap=index > 0)
                for row in rows:
                    grid.add_row(*map(RichText, row))
                console.print(grid)
            case Text(text, terminal=True):
                console.print(RichText(text))
            case Bullets(items):
                for item in items:
                    console.print(RichText(f"- {item}"))


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"* {item}" for item in items)
        case Grid(header, rows):
            ruler = ["---", *["---:"] * (len(header) - 1)]
            return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in (header, ruler, *rows))
        case Image(name, _, alt, caption):
            return f"![{alt}]({name})\n\n{caption}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"
        case Grid(header, rows):
            head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
            lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
            table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>"
            return f'<div class="scroll" tabindex="0">\n{table}\n</div>'
        case Image(_, png, alt, caption):
            source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
            return (
                f'<figure><img src="{source}" alt="{escape(alt)}"><figcaption>{escape(caption)}</figcaption></figure>'
            )
