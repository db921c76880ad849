"""The examples run as their first line says, go on where they stopped, and survive the death of a rank.

What they are compared with runs on ranks that are forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import HANG_S
from tests.support.forks import Forks
from tests.support.scripts import printed

ROOT = Path(__file__).parents[2]
LOOP = ROOT / "examples" / "own_loop.py"
FATED = """
import os, runpy, signal, sys
from shardengine.engine import Engine
step = Engine.step
def fated(self, **options):
    step(self, **options)
    if self.global_steps == 17 and self.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
Engine.step = fated
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def steps(text: str) -> list[str]:
    """The steps that a loop printed."""
    return [line for line in text.splitlines() if line.startswith("step ")]


def run(where: Path, ranks: int, *script: object) -> list[str]:
    """The steps that the loop printed. ranks: started by torchrun; 0: by the script itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "--max-restarts", 1]
    done = subprocess.run(
        [*map(str, [sys.executable, *(torchrun if ranks else ()), *script])],
        cwd=where, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return steps(done.stdout)


def test_a_ddp_script_prints_the_same_with_the_one_line_that_wraps(forks: Forks, tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_torch_loop.py"
    shown = run(tmp_path, 2, script, "--steps", 31)
    assert len(shown) == 4 and shown == steps(printed(forks, 2, script, "--steps", 31, "--ddp", where=tmp_path))
    assert (tmp_path / "runs" / "plain_torch_loop" / "model.safetensors").exists()


def test_own_loop_trains_goes_on_with_other_ranks_and_survives_a_death(tmp_path: Path) -> None:
    fated = tmp_path / "fated.py"
    fated.write_text(FATED, encoding="utf-8")
    shown = run(tmp_path, 2, fated, LOOP, 21)
    assert [line.split(":")[0] for line in shown] == ["step 0", "step 10", "step 10", "step 20"]
    assert shown[1] == shown[2]  # from the checkpoint before it, bit for bit as far as it is printed
    shown += run(tmp_path, 1, LOOP, 31)
    assert [line.split(":")[0] for line in shown[4:]] == ["step 30"]
    losses = [float(line.split()[3].rstrip(",")) for line in shown]
    assert losses[-1] < losses[0] - 1.0
    assert (tmp_path / "runs" / "own_loop" / "model" / "model.safetensors").exists()


def test_lightning_by_its_own_launcher_and_by_torchrun_prints_what_ddp_does_and_goes_on(
    forks: Forks, tmp_path: Path
) -> None:
    script = ROOT / "examples" / "lightning_loop.py"
    ddp, sharded = tmp_path / "ddp", tmp_path / "sharded"
    ddp.mkdir()
    sharded.mkdir()
    shown = steps(printed(forks, 2, script, "--steps", 11, "--strategy", "ddp", where=ddp))
    begun = run(sharded, 0, script, "--steps", 20)
    assert len(shown) == 2 and begun == shown
    went_on = run(sharded, 2, script, "--steps", 31, "--strategy", "shardengine_stage_1")
    assert [line.split(":")[0] for line in went_on] == ["step 20", "step 30"]
