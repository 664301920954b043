"""Documentation: every link resolves, and nothing tells a user to install another project."""

import re
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


def test_nothing_installs_another_project() -> None:
    """`areal` on the Python package index belongs to others; this distribution is `areal-flows`."""
    sources = [ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES]
    for folder in ("areal_core", "flows", "conf", "infra"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".tf", ".tftpl")]
    install = re.compile(r"pip install[^\n]*\bareal(?![-_\w./])")
    assert [str(path) for path in sources if install.search(path.read_text())] == []
