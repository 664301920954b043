"""Documentation: links resolve, tests named exist, and nothing tells a user to install another project."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
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


def python_examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_parts_work_as_a_library() -> None:
    _, *parts = python_examples(ROOT / "docs" / "python.md")
    assert len(parts) == 4
    for part in parts:
        assert part.count("\n") <= 12
        exec(part, {})


@pytest.mark.end_to_end
def test_the_first_python_example_trains(tmp_path: Path) -> None:
    first, *_ = python_examples(ROOT / "docs" / "python.md")
    done = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "reward/mean" in done.stdout
