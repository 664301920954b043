"""The notebooks of docs/notebooks run in a Jupyter kernel, outside of the checkout."""

from pathlib import Path

import pytest

from docs.gen.hook import NOTEBOOKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder; the notebooks share their base model in it."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs_and_shows_tables_and_plots(file: Path, folder: Path) -> None:
    import nbformat  # `make notebooks` installs both
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {"text/html", "image/png"} <= {kind for output in outputs for kind in output.get("data", {})}
    assert {output.get("name") for output in outputs} <= {None, "stdout"}, outputs  # no warnings
