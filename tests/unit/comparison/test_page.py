"""The same blocks as Markdown and as HTML, with nothing in them taken for markup."""

import base64
from pathlib import Path

from flows.comparison.page import Banner, Heading, Items, Picture, Table, Text, html, markdown


def _blocks(folder: Path):
    (folder / "p.png").write_bytes(b"picture")
    return [
        Banner("careful"),
        Heading("Numbers"),
        Text("a < b"),
        Items(["one", "x | y"]),
        Table(["", "arm"], [["speed", "1 [0, 2]"], ["why", "a|b & <c>"]]),
        Picture(folder / "p.png", "a picture"),
    ]


def test_markdown(tmp_path: Path) -> None:
    assert markdown("Title", _blocks(tmp_path)) == (
        "# Title\n\n> **careful**\n\n## Numbers\n\na \\< b\n\n- one\n- x \\| y\n\n"
        "|  | arm |\n| --- | --- |\n| speed | 1 [0, 2] |\n| why | a\\|b & \\<c> |\n\n"
        "![a picture](p.png)\n\na picture\n"
    )


def test_html_holds_its_pictures_and_escapes_text(tmp_path: Path) -> None:
    page = html("T & U", _blocks(tmp_path))
    assert "<title>T &amp; U</title>" in page
    assert '<p class="banner">careful</p>' in page
    assert "<td class=number>1 [0, 2]</td>" in page
    assert "<td>a|b &amp; &lt;c&gt;</td>" in page
    assert f"data:image/png;base64,{base64.b64encode(b'picture').decode()}" in page
    assert "p.png" not in page
