"""The notebooks run, from where Jupyter opens them, and their texts are what is run."""

from pathlib import Path

import jupytext
import nbclient
import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_text_and_notebook_are_a_pair(name):
    """Cell by cell; nothing was committed that had been run. `jupytext --sync` after a change of either."""
    text, notebook = (jupytext.read(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]
    for cell in notebook.cells:
        assert not cell.get("outputs")
    assert sum("REPOSITORY" in cell.source for cell in notebook.cells) == 1


@pytest.mark.slow
def test_all_of_them_run(tmp_path, monkeypatch):
    """In one home, as one reads them: the later ones find what the first has trained."""
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.delenv("XLA_FLAGS")  # they train for a while: what compiles quickly would compute slowly
    assert len(NAMES) == 4
    for name in NAMES:
        notebook = jupytext.read(FOLDER / f"{name}.ipynb")
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
        assert any(cell.get("outputs") for cell in notebook.cells)
