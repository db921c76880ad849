"""Which rank this process is: launchers' environments as tables, and two processes that really meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardengine.comm import rendezvous
from shardengine.errors import UsageError
from tests.app.test_train import tiny
from tests.support import HANG_S
from tests.support.forks import Forks
from tests.support.raising import raises
from tests.support.scripts import started

__all__ = ["tiny"]  # a fixture
ROOT = Path(__file__).parents[2]
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = ("SLURM", "OMPI_", "PMI_", "MPI_", "GLOO_", *TORCH)
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,07],gpu5",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
SHELL = {  # of salloc: what was asked for, and no step
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "node[1-2]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


def clean(**values: str) -> dict[str, str]:
    """This process's environment without any launcher's variables, and ``values``."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | values


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of ``join``, without any launcher's variables."""
    found = clean()
    monkeypatch.setattr(os, "environ", found)
    return found


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[01-03,07],gpu5", "node01"),
        ("gpu5,node[01-03]", "gpu5"),
        ("node[9,2-3]", "node9"),
        ("r[2-3]n[0-7].cluster.org", "r2n0.cluster.org"),
        ("a-b-[010-011]-x,c", "a-b-010-x"),
        ("localhost", "localhost"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str):
    assert rendezvous.first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[", "node[1-2", ",node1", "node[],x", "node]1", "node[-3]", "a b"])
def test_what_is_no_node_list_is_refused(nodes: str):
    with raises("slurm-node-list-unreadable"):
        rendezvous.first_host(nodes)


def test_tasks_per_node():
    assert [rendezvous.tasks_on(node, "2(x3),1") for node in range(4)] == ["2", "2", "2", "1"]
    assert rendezvous.tasks_on(0, "16") == "16"
    with raises("slurm-node-beyond-tasks", "is 4"):
        rendezvous.tasks_on(4, "2(x3),1")
    with raises("slurm-tasks-unreadable"):
        rendezvous.tasks_on(0, "2x3")


def test_a_task_of_a_slurm_step_is_a_rank(environment: dict[str, str]):
    environment.update(STEP)
    assert rendezvous.join()
    port = environment.pop("MASTER_PORT")
    assert [environment[name] for name in TORCH[:5]] == ["6", "7", "0", "1", "node01"]
    assert 12000 <= int(port) < 32000
    assert "GLOO_SOCKET_IFNAME" not in environment  # loopback cannot reach the other nodes
    others = [{**STEP, "SLURM_STEP_ID": "1"}, {**STEP, "SLURM_JOB_ID": "4712"}]
    assert port not in [(rendezvous.slurm_rank(other) or {})["MASTER_PORT"] for other in others]  # side by side
    first = rendezvous.slurm_rank({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}) or {}
    assert (first["MASTER_PORT"], first["LOCAL_WORLD_SIZE"]) == (port, "2")  # the port is the same on every rank


def test_ranks_of_one_machine_use_the_loopback_interface(environment: dict[str, str]):
    environment.update(STEP, SLURM_STEP_TASKS_PER_NODE="7", SLURM_NODEID="0")
    assert rendezvous.join()
    assert environment["GLOO_SOCKET_IFNAME"] == rendezvous.loopback()["GLOO_SOCKET_IFNAME"]


OWN = rendezvous.local_address(rendezvous._ELSEWHERE)
"""This machine's address on its default route; "" without a network."""


@pytest.mark.parametrize(
    ("meeting_place", "ways", "interface"),
    [
        ("localhost", {}, "lo"),
        ("::1", {}, "lo"),
        ("node01", {"node01": "10.1.0.7"}, "ib0"),
        ("node01", {"node01": "10.2.0.7"}, "eth1"),
        ("node01", {"node01": "fd00::7"}, "eth2"),
        ("me", {"me": "127.0.0.1", rendezvous._ELSEWHERE: "10.2.0.7"}, "eth1"),  # its own name, in /etc/hosts
        ("me", {"me": "127.0.0.1"}, None),
        ("node01", {}, None),
        ("node01", {"node01": "10.9.9.9"}, None),
        ("", {}, None),
    ],
)
def test_the_interface_of_gloo(
    meeting_place: str, ways: dict[str, str], interface: str | None, environment, monkeypatch
):
    there = {"127.0.0.1": "lo", "10.1.0.7": "ib0", "10.2.0.7": "eth1", "fd00::7": "eth2"}
    monkeypatch.setattr(rendezvous, "local_address", lambda host: ways.get(host, ""))
    monkeypatch.setattr(rendezvous, "interfaces", lambda: there)
    rendezvous.settle_gloo_interface(meeting_place)
    assert environment.get("GLOO_SOCKET_IFNAME") == interface
    environment["GLOO_SOCKET_IFNAME"] = "mine"
    rendezvous.settle_gloo_interface(meeting_place)
    assert environment["GLOO_SOCKET_IFNAME"] == "mine"


def test_the_interfaces_of_this_machine(environment: dict[str, str]):
    found = rendezvous.interfaces()
    assert found["127.0.0.1"] == "lo"
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}
    assert rendezvous.local_address("127.0.0.1") == "127.0.0.1"
    assert rendezvous.local_address("no.such.host.invalid") == ""


@pytest.mark.skipif(not OWN, reason="this machine has no network")
def test_the_address_of_this_machine_has_an_interface(environment: dict[str, str]):
    environment.update(STEP, MASTER_ADDR=OWN)
    assert rendezvous.join()
    name = environment["GLOO_SOCKET_IFNAME"]
    assert name == rendezvous.interfaces()[OWN] != "lo"
    environment.clear()
    rendezvous.settle_gloo_interface(socket.gethostname())
    assert environment.get("GLOO_SOCKET_IFNAME") != "lo"  # whatever the name stands for: others must reach it


@pytest.mark.skipif(not OWN, reason="this machine has no network")
def test_ranks_that_are_not_said_to_be_on_one_machine_meet_over_its_network(forks: Forks, tmp_path: Path):
    numbers = {"WORLD_SIZE": "2", "MASTER_ADDR": OWN, "MASTER_PORT": str(27000 + os.getpid() % 5000)}
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("{norm}", "{os.environ['GLOO_SOCKET_IFNAME']}"), encoding="utf-8")
    environments = [clean(RANK=str(rank), **numbers) for rank in range(2)]
    name = rendezvous.interfaces()[OWN]
    said = started(forks, environments, script, where=tmp_path)
    assert [each.splitlines() for each in said] == [[f"{rank} 2 None {name}"] for rank in range(2)]


@pytest.mark.parametrize(
    "values",
    [
        {},
        SHELL,
        {**SHELL, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},  # a batch script
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's shell on the first node
        {**STEP, "SLURM_STEP_ID": "-6"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun --pty bash inside salloc -n 8
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},  # accelerate launch --cpu starts one process
        {**MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "4"},  # without its own local ranks: not MPICH's launcher
    ],
)
def test_an_allocation_is_no_launch(environment: dict[str, str], values: dict[str, str]):
    environment.update(values)
    before = dict(environment)
    assert not rendezvous.join()
    assert environment == before


def test_a_shell_at_sruns_terminal_is_no_rank_but_its_steps_are(monkeypatch: pytest.MonkeyPatch):
    values = {**STEP, "SLURM_PTY_PORT": "36789"}
    monkeypatch.setattr(os, "isatty", lambda file: True)
    assert rendezvous.slurm_rank(values) is None
    monkeypatch.setattr(os, "isatty", lambda file: False)
    assert rendezvous.slurm_rank(values) is not None


def test_what_is_set_already_stays(environment: dict[str, str]):
    environment.update(STEP, MASTER_ADDR="mine", MASTER_PORT="1234", WORLD_SIZE="7", LOCAL_WORLD_SIZE="9")
    assert rendezvous.join()
    assert [environment[name] for name in TORCH] == ["6", "7", "0", "9", "mine", "1234"]


def test_torchruns_variables_come_before_slurms(environment: dict[str, str]):
    torchrun = dict(zip(TORCH, ["2", "4", "0", "2", "head", "99"], strict=True))
    environment.update(STEP, **torchrun)
    assert rendezvous.join()
    assert {name: environment[name] for name in TORCH} == torchrun


def test_mpi_comes_before_the_step_that_holds_its_daemons(environment: dict[str, str]):
    environment.update(STEP, **MPI)
    assert rendezvous.join()
    assert [environment[name] for name in TORCH] == ["1", "4", "1", "2", "first", "29500"]


def test_mpich(environment: dict[str, str]):
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MASTER_ADDR", "MASTER_PORT")
    environment.update(zip(names, ["3", "4", "1", "2", "first", "29500"], strict=True))
    assert rendezvous.join()
    assert [environment[name] for name in TORCH] == ["3", "4", "1", "2", "first", "29500"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**STEP, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but the launcher started 7"),
        ({**STEP, "SLURM_PROCID": "7"}, "task 7 of a step of 7 tasks"),
        ({**STEP, "SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST is not set"),
        ({**MPI, "MASTER_PORT": None}, "expected MASTER_ADDR"),
    ],
)
def test_contradictions_are_refused(environment: dict[str, str], values: dict[str, str | None], message: str):
    environment.update({name: value for name, value in values.items() if value is not None})
    with pytest.raises(UsageError, match=message):
        rendezvous.join()


PROGRAM = """
import os, sys, torch, shardengine
model = torch.nn.Linear(4, 1)
engine = shardengine.initialize(model, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
                                        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
engine.backward(engine(torch.full((1, 4), float(engine.rank))).sum())
norm = engine.get_global_grad_norm()
line = f"{engine.rank} {engine.world_size} {os.environ.get('LOCAL_RANK')} {norm}\\n"
sys.stdout.write(line)  # at once: ranks may share a pipe, and print's newline may be a write of its own
sys.stdout.flush()
engine.close()
"""
MEAN = (4 * 0.5**2 + 1) ** 0.5  # of the inputs 0 and 1, and of the bias's gradient 1


def slurm(rank: int, job: int) -> dict[str, str]:
    """The environment of task ``rank`` of a step of two tasks on this machine."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }


def mpi(rank: int, job: int) -> dict[str, str]:
    """The environment of rank ``rank`` of two that mpirun started on this machine."""
    numbers = [str(rank), "2", str(rank), "2", "localhost", str(15000 + job % 10000)]
    return dict(zip(MPI, numbers, strict=True))


@pytest.mark.parametrize("launcher", [slurm, mpi])
def test_two_processes_meet(launcher, forks: Forks, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM, encoding="utf-8")
    environments = [clean(**launcher(rank, os.getpid())) for rank in range(2)]
    for rank, said in enumerate(started(forks, environments, script, where=tmp_path)):
        words = said.split()
        assert words[:3] == [str(rank), "2", str(rank)]
        assert float(words[3]) == pytest.approx(MEAN)


@pytest.mark.parametrize(("options", "ranks"), [(["--multi_gpu"], 2), (["--cpu"], 1)])
def test_accelerate_launch(options: list[str], ranks: int, tmp_path: Path):
    """``--multi_gpu`` starts ranks through torchrun, also without a GPU; ``--cpu`` alone starts one process."""
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(PROGRAM, encoding="utf-8")
    port = str(22000 + os.getpid() % 5000)
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [*command, "--main_process_port", port, str(script)],
        env=clean(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = sorted(line.split()[:3] for line in done.stdout.splitlines() if line[:1].isdigit())
    assert rows == ([["0", "2", "0"], ["1", "2", "1"]] if ranks == 2 else [["0", "1", "None"]])


def test_the_train_command_under_slurm_is_one_rank_of_the_step(environment: dict[str, str], capsys, monkeypatch):
    from shardengine.app import command
    from shardengine.app.cli import main

    monkeypatch.setattr(command, "require", lambda *packages, extra: None)
    environment.update(STEP)
    assert main(["train", "--config", str(ROOT / "configs" / "demo.json"), "--ranks", "3"]) == 2
    assert "the launcher has started 7" in capsys.readouterr().err


def test_srun_starts_the_train_command(forks: Forks, tiny: Path, tmp_path: Path):
    output, script = tmp_path / "run", tmp_path / "command.py"
    script.write_text("import sys\nfrom shardengine.app.cli import main\nassert main() == 0\n", encoding="utf-8")
    asked = ["train", "--config", tiny / "config.json", "--steps", "2"]
    asked += ["--model", tiny / "model", "--data", tiny / "text.txt", "--output", output]
    environments = [clean(**slurm(rank, os.getpid() + 1)) for rank in range(2)]
    first, second = started(forks, environments, script, *asked, where=tmp_path)
    assert "2 on CPU" in first
    assert "finished at: step 2 of 2" in first
    assert second == ""  # rank 0 speaks
    assert (output / "model" / "model.safetensors").is_file()
