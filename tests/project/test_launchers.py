"""docs/launchers.md shows the files of examples/launchers, and each of them trains here as its launcher would start it.

SLURM, Kubernetes and clouds are played: their variables are set, and two processes of this machine are the nodes.
torchrun is real, and so is Ray where it is installed. Every run is made twice: the second time, without the newest
checkpoint, as if a kill had come before it; it goes on from the one before, and ends with the same bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.app.test_resume import curve, tag, tags, tiny, weights  # noqa: F401
from tests.support import HANG_S
from tests.support.program_runs import free_port

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "examples" / "launchers"
PAGE = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
LANGUAGES = {
    "slurm.sbatch": "bash",
    "kubeflow_trainjob.yaml": "yaml",
    "skypilot.yaml": "yaml",
    "ray_train.py": "python",
}
STEPS, SAVED = 4, 2
TORCHRUN_S = 'exec "{python}" -m torch.distributed.run "$@"'
COMMAND_S = 'exec "{python}" -m shardengine "$@"'
SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
nodes, each = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * each), "SLURM_STEP_NODELIST": "localhost"}
step["SLURM_STEP_TASKS_PER_NODE"] = f"{each}(x{nodes})"
tasks = []
for task in range(nodes * each):
    mine = {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task // each), "SLURM_LOCALID": str(task % each)}
    tasks.append(subprocess.Popen(words, env={**os.environ, **step, **mine}))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[1-2]"], sys.argv
print("localhost\\nlocalhost")
"""
RAY = """
import os, runpy, shutil, signal, sys
import ray
def fate():
    from shardengine.engine import Engine
    step = Engine.step
    def fated(self, **options):
        step(self, **options)
        if self.global_steps == 7 and self.rank == 1 and os.path.exists({die!r}):
            os.remove({die!r})
            os.kill(os.getpid(), signal.SIGKILL)
    Engine.step = fated
ray.init(
    num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={{"worker_process_setup_hook": fate}}
)
for storage, *options in {runs!r}:
    if storage.endswith("died"):
        open({die!r}, "w").close()
    sys.argv = ["ray_train.py", "--storage", storage, *options]
    runpy.run_path({script!r}, run_name="__main__")
    assert not os.path.exists({die!r})
    if storage.endswith("whole"):
        shutil.copytree(storage, {other!r})
        shutil.rmtree({other!r} + "/checkpoints/step-00000010")
"""


# The page


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_page_shows_the_file(name: str) -> None:
    assert (LANGUAGES[name], (FILES / name).read_text(encoding="utf-8")) in BLOCKS
    assert f"(../examples/launchers/{name})" in PAGE


def test_there_is_no_other_file_and_every_other_block_is_run() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_file()} == set(LANGUAGES)
    others = [block for _, block in BLOCKS if block not in {path.read_text(encoding="utf-8") for path in files()}]
    assert others == [of_page("torchrun --nnodes"), of_page("srun --kill-on-bad-exit")]


def files() -> list[Path]:
    return [FILES / name for name in LANGUAGES]


def of_page(begin: str) -> str:
    """The one block of the page that begins so."""
    (found,) = (block for _, block in BLOCKS if block.startswith(begin))
    return found


# Runs


class Cluster:
    """The folder ``/shared``, programs that launchers find on PATH, and what they set for all."""

    def __init__(self, folder: Path, tiny: Path) -> None:  # noqa: F811
        self.shared, self._bin = folder / "shared", folder / "bin"
        self.run = self.shared / "run1"
        shutil.copytree(tiny, self.shared)
        self._bin.mkdir()
        self.program("torchrun", f"#!/bin/sh\n{TORCHRUN_S.format(python=sys.executable)}\n")
        self.program("shardengine", f"#!/bin/sh\n{COMMAND_S.format(python=sys.executable)}\n")

    def program(self, name: str, text: str) -> None:
        """An executable on PATH."""
        (self._bin / name).write_text(text, encoding="utf-8")
        (self._bin / name).chmod(0o755)

    def here(self, text: str) -> str:
        """With the paths of this machine, and a few steps."""
        text = re.sub(r"/shared\b", str(self.shared), text)
        text = re.sub(r"(--steps[ =])1000\b", rf"\g<1>{STEPS}", text)
        return re.sub(r"(--save-every[ =])100\b", rf"\g<1>{SAVED}", text)

    def start(self, nodes: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> str:
        """What the commands of all nodes, which run at once, printed; they end well."""
        path = os.pathsep.join([str(self._bin), os.environ["PATH"]])
        common = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        logs = [self.shared.parent / f"node-{number}.txt" for number in range(len(nodes))]
        running = []
        for log, (words, environment) in zip(logs, nodes, strict=True):
            with log.open("w", encoding="utf-8") as file:
                environment = {**os.environ, **common, **environment}
                running.append(subprocess.Popen(words, env=environment, stdout=file, stderr=file, cwd=self.shared))
        try:
            codes = [each.wait(timeout=HANG_S) for each in running]
        finally:
            for each in running:
                each.kill()
        said = "\n".join(log.read_text(encoding="utf-8") for log in logs)
        assert codes == [0] * len(nodes), said[-6000:]
        return said

    def train_twice(
        self,
        nodes: Sequence[tuple[Sequence[str], Mapping[str, str]]],
        again: Sequence[tuple[Sequence[str], Mapping[str, str]]] | None = None,
    ) -> None:
        """The second time (``again``: in other words) without the newest checkpoint."""
        said = self.start(nodes)
        assert "2 rank(s)" in said and "resumed:" not in said
        before = curve(self.run), weights(self.run)
        assert len(before[0]) == STEPS and tags(self.run) == [tag(SAVED), tag(STEPS)]
        shutil.rmtree(self.run / "checkpoints" / tag(STEPS))
        said = self.start(again or nodes)
        assert said.count(f"resumed:     from step {SAVED}") == 1
        assert (curve(self.run), weights(self.run)) == before


@pytest.fixture
def cluster(tiny: Path, tmp_path: Path) -> Cluster:  # noqa: F811
    return Cluster(tmp_path, tiny)


def job(first_port: int, ports: int, factor: int = 1) -> str:
    """The number of a job for which the port that is made from it is free."""
    for number in range(1, ports):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first_port + number * factor % ports))
            except OSError:
                continue
            return str(number)
    raise AssertionError("no port is free")


# torchrun


@pytest.mark.full
def test_torchrun_on_two_nodes(cluster: Cluster) -> None:
    text = cluster.here(of_page("torchrun --nnodes"))
    assert "--nproc-per-node 8" in text and "host1:29500" in text
    text = text.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("host1:29500", f"localhost:{free_port()}")
    cluster.train_twice([(["bash", "-c", text], {"PET_LOCAL_ADDR": "127.0.0.1"})] * 2)


# SLURM


def in_slurm(cluster: Cluster, nodes: int, each: int, number: str) -> dict[str, str]:
    """What a batch script finds; srun and scontrol are on PATH."""
    cluster.program("srun", f"#!{sys.executable}{SRUN}")
    cluster.program("scontrol", f"#!{sys.executable}{SCONTROL}")
    return {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NAME": "run1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * each),
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_PROCID": "0",
        "PET_LOCAL_ADDR": "127.0.0.1",
    }


def test_the_batch_file_is_bash_and_asks_for_one_task_per_node() -> None:
    done = subprocess.run(["bash", "-n", FILES / "slurm.sbatch"], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (FILES / "slurm.sbatch").read_text(encoding="utf-8").splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert lines[0] == "#!/bin/bash" and asked["ntasks-per-node"] == "1" and asked["job-name"] == "run1"
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:]), "sbatch stops reading there"


@pytest.mark.full
def test_slurm_starts_torchrun_on_two_nodes(cluster: Cluster) -> None:
    script = cluster.shared / "slurm.sbatch"
    script.write_text(cluster.here((FILES / "slurm.sbatch").read_text(encoding="utf-8")), encoding="utf-8")
    environment = in_slurm(cluster, 2, 1, job(20000, 10000))
    cluster.train_twice([(["bash", str(script)], environment)])


@pytest.mark.full
def test_srun_starts_the_ranks_itself(cluster: Cluster) -> None:
    environment = in_slurm(cluster, 1, 2, job(12000, 20000, 31))
    begin, go_on = cluster.here(of_page("srun --kill-on-bad-exit").replace("\\\n", " ")).splitlines()
    cluster.train_twice([(["bash", "-c", begin], environment)], [(["bash", "-c", go_on], environment)])


# Kubeflow and SkyPilot


def tree(text: str) -> dict[str, Any]:
    """Of YAML."""
    found: dict[str, Any] = pytest.importorskip("yaml").safe_load(text)
    return found


def test_the_trainjob_has_the_fields_of_a_trainjob() -> None:
    found = tree((FILES / "kubeflow_trainjob.yaml").read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    spec = found["spec"]
    assert set(spec) <= {"initializer", "managedBy", "runtimePatches", "runtimeRef", "suspend", "trainer"}
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    trainer = spec["trainer"]
    assert set(trainer) <= {"args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"}
    assert all(isinstance(word, str) for word in [*trainer["command"], *trainer["args"]])
    assert any("gpu" in name for name in trainer["resourcesPerNode"]["limits"]), "by that name GPUs are counted"
    ((node,),) = (each["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"] for each in spec["runtimePatches"])
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]} and mounted["shared"] == "/shared"
    assert f"--rdzv-id={found['metadata']['name']}" in trainer["args"]


@pytest.mark.skipif(find_spec("kubeflow_trainer_api") is None, reason="kubeflow-trainer-api is not installed")
def test_kubeflow_reads_the_whole_trainjob() -> None:
    models: Any = pytest.importorskip("kubeflow_trainer_api.models")
    given = tree((FILES / "kubeflow_trainjob.yaml").read_text(encoding="utf-8"))
    assert models.TrainerV1alpha1TrainJob.from_dict(given).to_dict() == given


@pytest.mark.full
def test_a_trainjob_trains_on_two_nodes(cluster: Cluster) -> None:
    trainer = tree(cluster.here((FILES / "kubeflow_trainjob.yaml").read_text(encoding="utf-8")))["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost"}
    common["PET_MASTER_PORT"] = str(free_port())
    words = [*trainer["command"], *trainer["args"]]
    cluster.train_twice([(words, {**common, "PET_NODE_RANK": str(node)}) for node in range(2)])


def test_the_task_has_the_fields_of_a_task() -> None:
    task = tree((FILES / "skypilot.yaml").read_text(encoding="utf-8"))
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "workdir", "envs", "setup", "run"}
    assert set(task["resources"]) == {"infra", "accelerators", "job_recovery"}
    assert task["volumes"].keys() == {"/shared"} and f"--rdzv-id {task['name']} " in task["run"]


@pytest.mark.skipif(find_spec("sky") is None, reason="skypilot is not installed")
def test_skypilot_reads_the_whole_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    task = pytest.importorskip("sky").Task.from_yaml(str(FILES / "skypilot.yaml"))
    assert (task.name, task.num_nodes, task.volumes) == ("run1", 2, {"/shared": "shared"})
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8} and resources.job_recovery["max_restarts_on_errors"] == 3


@pytest.mark.full
def test_a_task_of_skypilot_trains_on_two_nodes(cluster: Cluster) -> None:
    task = tree(cluster.here((FILES / "skypilot.yaml").read_text(encoding="utf-8")))
    common = {**{name: str(value) for name, value in task["envs"].items()}, "PORT": str(free_port())}
    common |= {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    common["SKYPILOT_NODE_IPS"] = "127.0.0.1\n127.0.0.1"
    cluster.train_twice(
        [(["bash", "-c", task["run"]], {**common, "SKYPILOT_NODE_RANK": str(node)}) for node in range(2)]
    )


# Ray


@pytest.mark.full
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_trains_and_goes_on_with_other_numbers_of_workers_and_after_a_death(tmp_path: Path) -> None:
    whole, died, other = (tmp_path / name for name in ("whole", "died", "other"))
    runs = [(str(whole), "--workers", "2"), (str(died), "--workers", "2"), (str(other), "--workers", "3")]
    names = {"die": str(tmp_path / "die"), "other": str(other), "script": str(FILES / "ray_train.py")}
    program = RAY.format(runs=[[*run, "--steps", "10"] for run in runs], **names)
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("the model is in ") == len(runs)

    def log(folder: Path) -> list[tuple[float, ...]]:
        rows = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text("utf-8").splitlines()]
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    expected = log(whole)
    assert [row[0] for row in expected] == list(range(1, 11)) and expected[-1][1] < expected[0][1]
    assert log(died)[-5:] == expected[5:] and set(log(died)) == set(expected)
    model, again, elsewhere = (load_file(each / "model" / "model.safetensors") for each in (whole, died, other))
    assert all(torch.equal(again[name], value) for name, value in model.items())
    assert log(other)[:10] == expected and len(log(other)) == 15
    for (step, _, norm), (same, _, before) in zip(log(other)[10:], expected[5:], strict=True):
        assert step == same and norm == pytest.approx(before, rel=1e-4)  # the loss is rank 0's, of fewer rows
    assert all(torch.allclose(elsewhere[name], value, rtol=0, atol=1e-4) for name, value in model.items())
    index = json.loads((other / "checkpoints" / "step-00000010" / "index.json").read_text("utf-8"))["index"]
    assert (index["world_size"], index["batch"]["train_batch_size"]) == (3, 24)
