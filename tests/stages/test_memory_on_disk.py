"""What a process really takes, with the states of 50 million parameters on disk, as the system counts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import HANG_S

WIDTH, BLOCKS, BUCKET, BUFFERS = 2500, 8, 2_000_000, 3
SLACK = 64 << 20
"""Bytes that no formula knows: activations, the allocator's own, a thread's stack."""

SCRIPT = f"""
import json, sys
from pathlib import Path
import torch
from torch import nn
import shardengine

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}) for _ in range({BLOCKS}))
    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

model = Tower()
place = {{"device": "nvme", "nvme_path": sys.argv[1], "buffer_count": {BUFFERS}}} if sys.argv[1] else {{}}
engine = shardengine.initialize(model, {{
    "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": 2, "reduce_bucket_size": {BUCKET}, "offload_optimizer": place}},
}})
for _ in range(2):
    engine.backward(engine(torch.ones(1, {WIDTH})).square().mean())
    engine.step()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmHWM")
engine.backward(engine(torch.ones(1, {WIDTH})).square().mean())
engine.step()
found = {{"resident": status("VmHWM"), "before": before, **engine.memory()}}
found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
found["disk"] = sum(file.stat().st_blocks * 512 for file in engine._core.tiers.files)
engine.close()
print(json.dumps(found))
"""


def run(folder: str) -> dict[str, float]:
    command = [sys.executable, "-c", SCRIPT, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # so that what is freed goes back to the system
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_states_on_disk_leave_host_memory(tmp_path: Path) -> None:
    """12 bytes per parameter are in the file, and 8 less in memory, but for the buffers that are declared."""
    here, there = run(""), run(str(tmp_path))
    parameters = there["parameters"]
    assert parameters > 50e6
    assert 12 * parameters <= there["disk"] <= 12.02 * parameters
    assert there["measured_disk_bytes"] == there["predicted_disk_bytes"] <= there["disk"]
    assert there["tier_buffer_bytes"] <= BUFFERS * (12 * BUCKET + (2 << 20))
    buffers = there["tier_buffer_bytes"] + there["buffer_bytes"] - here["buffer_bytes"]
    assert here["resident"] - there["resident"] >= 8 * parameters - buffers - SLACK, (here, there)
    assert buffers < 2.5 * parameters
