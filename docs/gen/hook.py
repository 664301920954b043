"""MkDocs hook: make pages of the schema, of the commands' --help and of the notebooks.

`python -m docs.gen.hook` writes the page of the schema, which is committed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
_SIGNS = {"low": "≥", "above": ">", "high": "≤"}
_OPENING = """# Configuration

Every command takes these fields as `field=value`, in Hydra's grammar:

    areal train experiment=cpu-tools training.steps=50 algorithm=gspo

`algorithm=gspo` takes a choice, a file of `conf/algorithm`. Its values replace the defaults below. The values of the
experiment replace both. `areal train ... --cfg job` prints the resolved configuration and starts nothing.
"""


def on_config(config: Any) -> None:
    """Make anchors as GitHub does, so that links hold in both places."""
    config.mdx_configs["toc"]["slugify"] = lambda heading, separator: anchor(heading)


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File  # absent where only tests run

    for name, page in PAGES.items():
        if not (ROOT / "docs" / name).exists():
            files.append(File.generated(config, name, content=page()))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace links to files outside of docs/ by their paths, and links to notebooks by links to their pages."""

    up = "../" * (page.file.src_uri.count("/") + 1)
    markdown = re.sub(rf"\[([^\]]+)\]\({re.escape(up)}([^)#]+)[^)]*\)", r"\1 (`\2`)", markdown)
    return re.sub(r"(\]\([\w/.-]+)\.ipynb\)", r"\1.md)", markdown)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def configuration() -> str:
    """A table for each group of fields, described by the comments of the schema."""
    from areal_core.config.schema import RunConfig

    return "\n".join([_OPENING, *_group(RunConfig, "run", "")])


def command_line() -> str:
    """The help of every command."""
    from flows.cli import COMMANDS

    calls = {"areal": []} | {f"areal {name}": [name] for name in COMMANDS}
    return "\n".join(["# Command line", *(f"\n## {call}\n\n```\n{_help(words)}```" for call, words in calls.items())])


def notebook(file: Path) -> str:
    """A notebook's cells as Markdown."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = {"reference/configuration.md": configuration, "reference/command-line.md": command_line}
COMMITTED = ROOT / "docs" / "reference" / "configuration.md"  # other pages link to it, also in the checkout
PAGES |= {f"notebooks/{file.stem}.md": functools.partial(notebook, file) for file in NOTEBOOKS}


def _help(words: list[str]) -> str:
    from flows.cli import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit), mock.patch.dict(os.environ, COLUMNS="100"):
        main([*words, "--help"])
    return shown.getvalue()


def _group(schema: type, title: str, prefix: str) -> Iterator[str]:
    hints, comments, below = typing.get_type_hints(schema), _comments(schema), []
    yield f"## {title}\n\n{(inspect.getdoc(schema) or '').split(chr(10) * 2)[0]}\n"
    if choices := sorted(path.stem for path in (ROOT / "conf" / title).glob("*.yaml")):
        yield f"Choices: {', '.join(f'`{title}={choice}`' for choice in choices)}.\n"
    yield "| field | type | default | bounds | description |\n|---|---|---|---|---|"
    for each in dataclasses.fields(schema):
        hint, name, comment = hints[each.name], prefix + each.name, comments.get(each.name, "")
        if typing.get_origin(hint) is dict:
            hint, name = typing.get_args(hint)[1], f"{name}.NAME"
        if dataclasses.is_dataclass(hint):
            below.append((hint, name))
            cells = [f"[`{name}`](#{anchor(name.removeprefix('tasks.NAME.'))})", "group", "", "", comment]
        else:
            kinds = " or ".join(_TYPES[option] for option in typing.get_args(hint) or (hint,))
            bounds = [
                f"{sign} {limit}" for key, sign in _SIGNS.items() if (limit := each.metadata.get(key)) is not None
            ]
            bounds += [f"`{choice}`" for choice in each.metadata.get("choices", ())]
            default = f"`{textwrap.shorten(json.dumps(each.default), 70, placeholder='...')}`"
            cells = [f"`{name}`", kinds, default, ", ".join(bounds), comment]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for group, name in below:
        if prefix != "tasks.NAME.":  # whose groups have the fields of `task` and `environment`
            yield from _group(group, name, f"{name}.")


def _comments(schema: type) -> dict[str, str]:
    """The comments beside each field and directly above it."""
    source, found = inspect.getsource(schema), dict[str, str]()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = {each.start[0]: each.string.lstrip("# ") for each in tokens if each.type == tokenize.COMMENT}
    alone = {number for number, line in enumerate(source.splitlines(), 1) if line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = next(line for line in range(node.lineno, 0, -1) if line - 1 not in alone)
            lines = range(first, (node.end_lineno or first) + 1)
            found[node.target.id] = " ".join(text[line] for line in lines if line in text)
    return found


if __name__ == "__main__":
    COMMITTED.parent.mkdir(exist_ok=True)
    COMMITTED.write_text(configuration())
