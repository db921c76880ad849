"""The examples run as their first line says, and go on where they stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_own_loop_trains_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shown = []
    for steps in ("21", "10"):
        done = subprocess.run(
            [*command, str(ROOT / "examples" / "own_loop.py"), steps],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        shown.append([line for line in done.stdout.splitlines() if line.startswith("step ")])
    assert [line.split(":")[0] for lines in shown for line in lines] == ["step 0", "step 10", "step 20", "step 30"]
    losses = [float(line.split()[3].rstrip(",")) for lines in shown for line in lines]
    assert losses[-1] < losses[0] - 1.0
    assert (tmp_path / "runs" / "own_loop" / "model" / "model.safetensors").exists()
