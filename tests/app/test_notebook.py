"""examples/notebook.ipynb: its cells run one after the other, and what the ranks return is what the text says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANG_S

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
CELLS: list[dict[str, Any]] = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"]) >= 10


@pytest.mark.full  # starts four ranks, each of which imports torch
@pytest.mark.skipif(find_spec("cloudpickle") is None, reason="cloudpickle is not installed; it comes with 'notebook'")
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed; it comes with 'notebook'")
def test_its_cells_run(tmp_path: Path) -> None:
    """As in a notebook, ``__main__`` is no file: ``python -c``."""
    cells = ["".join(cell["source"]) for cell in CELLS]
    program = f"for cell in {cells!r}:\n    exec(cell)\nprint(text == POEM[:120])\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6 and losses[0] > 4 and losses[-1] < 0.1
    assert "the same bits: True\n" in done.stdout and done.stdout.endswith("True\n")
