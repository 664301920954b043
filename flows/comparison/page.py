"""A page as a list of blocks, written as Markdown and as one HTML file that holds its own pictures."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #222;
       max-width: 1040px; margin: 2em auto; padding: 0 20px; }
h1 { font-size: 1.7em; margin-bottom: .3em; } h2 { font-size: 1.25em; margin: 2em 0 .6em; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; } td.number { white-space: nowrap; }
.scroll { overflow-x: auto; }
.banner { background: #fff3cd; border: 2px solid #e69f00; padding: 10px 16px; font-weight: bold; margin: 1em 0; }
figure { margin: 1.5em 0; } figure img { width: 100%; } figcaption { color: #555; font-size: .92em; }
ul { padding-left: 1.3em; }
"""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Banner:
    """What nobody may overlook."""

    text: str


@dataclass(frozen=True)
class Items:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    path: Path  # in the page's own folder
    caption: str


Block = Heading | Text | Banner | Items | Table | Picture


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The page as Markdown; pictures are links to files beside it."""
    return "\n\n".join([f"# {_plain(title)}", *map(_markdown, blocks)]) + "\n"


def html(title: str, blocks: Sequence[Block]) -> str:
    """The page as HTML that needs no other file."""
    body = "\n".join(map(_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Banner(text):
            return f"> **{_plain(text)}**"
        case Items(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(header, rows):
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)
        case Picture(path, caption):
            return f"![{_plain(caption)}]({path.name})\n\n{_plain(caption)}"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text):
            return f"<p>{escape(text)}</p>"
        case Banner(text):
            return f'<p class="banner">{escape(text)}</p>'
        case Items(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Table(header, rows):
            head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
            body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
            return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'
        case Picture(path, caption):
            data = base64.b64encode(path.read_bytes()).decode()
            return (
                f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )


def _cell(text: str) -> str:
    return f"<td{' class=number' if re.match(r'-?[0-9]', text) else ''}>{escape(text)}</td>"


def _plain(text: str) -> str:
    """`text` so that Markdown shows it as it is."""
    return re.sub(r"([\\|*<`])", r"\\\1", text)
