"""Documentation: links resolve, tests named exist, the site has every page, and nobody installs another project."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_core.config.fields import leaves
from areal_core.config.schema import RunConfig
from areal_core.environments.environment import Environment
from areal_core.types import Prompt
from docs.gen import hook
from flows.cli import COMMANDS
from flows.compose import compose, split_experiment

ROOT = Path(__file__).parents[2]
GENERATED = {ROOT / "docs" / name: cache(page) for name, page in hook.PAGES.items()}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = GENERATED[page]() if page in GENERATED else page.read_text()
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {hook.anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *hook.NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not (file.exists() or file in GENERATED) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


EXAMPLES = {"test_what_another_rank_finds_damaged_no_rank_takes", "test_resume_skips_damaged_checkpoint"}  # of names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    files = {str(path.relative_to(ROOT / "tests")): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    known = {*files, *(Path(file).name for file in files), *EXAMPLES}
    known.update(re.findall(r"def (test_\w+)", "\n".join(files.values())))
    named = re.findall(r"(?:[\w/]+/)?\btest_\w+(?:\.py)?", page.read_text())
    assert {name.removeprefix("tests/") for name in named} - known == set()


def test_nothing_installs_another_project() -> None:
    """`areal` on the Python package index belongs to others; this distribution is `areal-flows`."""
    sources = [ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES]
    for folder in ("areal_core", "flows", "conf", "infra"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".tf", ".tftpl")]
    install = re.compile(r"pip install[^\n]*\bareal(?![-_\w./])")
    assert [str(path) for path in sources if install.search(path.read_text())] == []


def pages_of(nav: Any) -> Iterator[str]:
    """The files that a part of mkdocs.yml's nav names."""
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(each)


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(pages_of(nav)) == sorted({*written, *hook.PAGES})


def test_reference_of_fields_has_every_field_and_its_comment() -> None:
    page = hook.configuration()
    assert hook.COMMITTED.read_text() == page, "python -m docs.gen.hook"
    fields = {name for name, _ in leaves(RunConfig().to_dict())} | {"tasks.NAME.ratio"}
    assert {name for name in fields if f"| `{name}` |" not in page} == set()
    assert "| `training.minibatches` | integer | `4` | ≥ 1 | PPO minibatches per step, of whole groups; the" in page
    assert '| `algorithm.credit` | text | `"rollout"` | `rollout`, `sequence`, `turn` | unit with its own' in page
    headings = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert set(re.findall(r"\]\(#(.+?)\)", page)) <= {hook.anchor(heading) for heading in headings}


def test_reference_of_commands_has_every_command() -> None:
    page = hook.command_line()
    assert [name for name in COMMANDS if f"usage: areal {name} " not in page] == []


def test_files_of_the_first_pages_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README and the pages of docs/start name each of their files in its first line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    modules: dict[str, dict[str, Any]] = {}
    for page in (ROOT / "README.md", *(ROOT / "docs" / "start").glob("*.md")):
        for name, text in re.findall(r"^```\w+\n# (mine/\S+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            (tmp_path / name).write_text(text)
            if name.endswith(".py"):
                exec(compile(text, name, "exec"), modules.setdefault(name, {"__name__": name}))
    config = compose(*split_experiment(["experiment=mine/cities.yaml"]))
    assert (config.task.path, config.environment.verifier) == ("mine/train.jsonl", "one_city:one_city")
    row = json.loads((tmp_path / "mine" / "train.jsonl").read_text().splitlines()[0])
    task = Prompt(index=0, prompt_id="", text=row["question"], token_ids=(), answer=row["answer"], row=row)
    scores = {city: modules["mine/one_city.py"]["one_city"](task, f"In {city}.") for city in row["cities"]}
    assert scores == {city: float(city == row["answer"]) for city in row["cities"]}
    assert modules["mine/tutor.py"]["first_step"]("7*8-3=") == "7*8=6;"
    for name, environment in (("tutor", "Tutor"), ("again", "Again")):
        assert issubclass(modules[f"mine/{name}.py"][environment], Environment)


@pytest.mark.parametrize("file", hook.NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_are_committed_without_outputs(file: Path) -> None:
    notebook = json.loads(file.read_text())
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)


def python_examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_parts_work_as_a_library() -> None:
    _, *parts = python_examples(ROOT / "docs" / "python.md")
    assert len(parts) == 4
    for part in parts:
        assert part.count("\n") <= 12
        exec(part, {})


@pytest.mark.slow
def test_the_first_python_example_trains(tmp_path: Path) -> None:
    first, *_ = python_examples(ROOT / "docs" / "python.md")
    done = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in done.stdout
