"""Ranks die under real launchers: torchrun with restarts, with nodes that leave, and the command's own parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.app import resume
from shardengine.comm import mesh
from shardengine.errors import CommunicationError
from tests.app.test_elastic import CLOSE, calm  # noqa: F401
from tests.app.test_resume import curve, run, tag, tags, tiny, weights  # noqa: F401
from tests.app.test_train import CORPUS, start
from tests.support import HANG_S
from tests.support.program_runs import free_port
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ROOT = Path(__file__).parents[2]
STEPS = 12
# A rank looks for the built-in text after it has loaded everything else: the text that it finds brings a fate.
FATE = """
import os, signal, time
from pathlib import Path
topics = {"all": __CORPUS__}
if "RANK" in os.environ:
    from shardengine.engine import Engine
    once = Path(__file__).parents[1] / "once"
    rank, ranks, agent = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "AGENT"))
    if "NODE" in os.environ and ranks == 1 and not once.exists():
        time.sleep(200)  # the other node is late: when it is there torchrun starts the ranks anew
    step = Engine.step
    def fated(self, **options):
        step(self, **options)
        now = self.global_steps
__FATE__
    Engine.step = fated
"""
DIES = """
if now == 6 and rank == ranks - 1 and not once.exists():
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVES = """
if now == 6 and ranks == 2 and os.environ["NODE"] == "1":
    once.touch()
    os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
if now == 9 and once.exists():
    os.kill(agent, signal.SIGTERM)
    deadline = time.monotonic() + 600
    while not signal.getsignal(signal.SIGTERM).__self__.signalled and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def fate(folder: Path, what: str) -> dict[str, str]:
    """The environment in which ranks meet their fate."""
    (folder / "pydoc_data").mkdir()
    (folder / "pydoc_data" / "__init__.py").touch()
    text = FATE.replace("__CORPUS__", repr(CORPUS)).replace("__FATE__", textwrap.indent(what, " " * 8))
    (folder / "pydoc_data" / "topics.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def torchrun(
    folder: Path, environment: dict[str, str], launcher: list[object], asked: list[object]
) -> subprocess.Popen:
    """torchrun; its ranks know its process as AGENT, and leave their exit codes in ``folder``."""
    words = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node"]
    ranks = 'trap : TERM; "$@"; code=$?; echo $code > "$LEFT/exit-$RANK-of-$WORLD_SIZE"; exit $code'
    words += [
        environment.get("RANKS", "1"),
        "--no-python",
        "bash",
        "-c",
        ranks,
        "_",
        sys.executable,
        "-m",
        "shardengine",
    ]
    return subprocess.Popen(
        ["sh", "-c", 'AGENT=$$ exec "$@"', "_", *map(str, [*words, "train", *asked])],
        env={**os.environ, **environment, "LEFT": str(folder), "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_that_are_started_again_find_an_empty_part_of_the_store():
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.set("shardengine/asks/2", "of a rank that died before it had an answer")
    for generation in range(3):
        with ThreadPoolExecutor(3) as ranks:
            others = {rank: {0, 1, 2} - {rank} for rank in (2, 1, 0)}
            asked = [ranks.submit(mesh._fresh, store, rank, 3, timedelta(seconds=20), others[rank]) for rank in others]
            parts = [each.result() for each in asked]
        assert others[0] == set()
        assert not parts[0].check(["what"])
        parts[0].set("what", str(generation))
        assert all(part.get("what") == str(generation).encode() for part in parts)
    with raises("initialize-ranks-missing", "[1]", "of 2", "0.1"):
        mesh._fresh(dist.HashStore(), 0, 2, timedelta(seconds=0.1), {1})  # type: ignore[attr-defined]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_to_join_tells(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(mesh, "_WARN_AFTER_S", 0.01)
    with pytest.raises(CommunicationError, match=rf"rank {rank}: 2 ranks did not meet at 127.0.0.1:{port} within 1 s"):
        mesh._join(torch.device("cpu"), timedelta(seconds=1))
    said = [each.message for each in caplog.records if "waits for other ranks" in each.message]
    assert len(said) == 1 and f"(of ranks {1 - rank}, as far as" in said[0]


@pytest.fixture(scope="module")
def whole(pools: Pools, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The outputs of runs that nobody disturbs, on one rank and on two."""
    output = tmp_path_factory.mktemp("undisturbed")
    asked = ["--config", tiny / "config.json", "--model", tiny / "model", "--data", tiny / "text.txt"]
    for ranks in (1, 2):
        run(pools(ranks), *asked, "--steps", STEPS, "--output", output / str(ranks))
    return output


def test_a_killed_rank_under_torchrun_changes_nothing(tiny: Path, whole: Path, tmp_path: Path):  # noqa: F811
    output = tmp_path / "run"
    asked = ["--config", tiny / "config.json", "--model", tiny / "model", "--steps", STEPS, "--output", output]
    launcher: list[object] = ["--standalone", "--max-restarts", 2]
    process = torchrun(tmp_path, {**fate(tmp_path, DIES), "RANKS": "2"}, launcher, [*asked, "--save-every", 4])
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert (tmp_path / "once").exists()
    assert out.count("resumed:") == 1 and "resumed:     from step 4" in out
    assert "batch:       16 = 4 per rank x 2 micro-batch(es) x 2 rank(s)" in out
    assert curve(output) == curve(whole / "2")
    assert weights(output) == weights(whole / "2")
    assert tags(output) == [tag(8), tag(12)]


def test_a_killed_rank_of_our_own_parent_changes_nothing(tiny: Path, whole: Path, tmp_path: Path):  # noqa: F811
    output, environment = tmp_path / "run", fate(tmp_path, DIES)
    asked = ["--ranks", 1, "--steps", STEPS, "--output", output, "--save-every", 4, "--max-restarts", 2]
    process = start(tiny, *asked, environment=environment)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    lines = [line for line in err.splitlines() if "restart" in line]
    assert lines == [
        "rank 0 was killed by SIGKILL (often the system, out of memory); restart 1 of 2: resumes from step 4"
    ]
    assert "Traceback" not in err
    assert out.count("resumed:") == 1 and "resumed:     from step 4" in out
    assert curve(output) == curve(whole / "1")
    assert weights(output) == weights(whole / "1")


def test_a_node_leaves_and_the_other_one_goes_on_until_it_is_told_to_stop(
    pools: Pools,
    calm: Path,  # noqa: F811
    tmp_path: Path,
):
    output, environment = tmp_path / "run", fate(tmp_path, LEAVES)
    values = json.loads((calm / "config.json").read_text(encoding="utf-8")) | {"train_batch_size": 12}
    del values["gradient_accumulation_steps"]
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    # torchrun 2.13 cannot let a node join ranks that run when its agents share a store with them
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # nobody's death ends it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    launcher: list[object] = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}"]
    launcher += ["--rdzv-id", "a", "--max-restarts", 3, "--local-addr", "127.0.0.1", "--rdzv-conf"]
    launcher += ["is_host=false,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"]
    asked = ["--config", tmp_path / "config.json", "--model", calm / "model", "--steps", STEPS, "--output", output]
    asked += ["--save-every", 2]
    nodes = [torchrun(tmp_path, {**environment, "NODE": number}, launcher, asked) for number in "01"]
    (out, err), _ = (node.communicate(timeout=HANG_S) for node in nodes)
    assert nodes[1].returncode == -9, (out, err)
    assert (tmp_path / "exit-0-of-1").read_text(encoding="utf-8") == "0\n", (out, err)
    assert nodes[0].returncode != 0 and "SignalException" in err  # torchrun's own way to say that it was signalled
    assert "stopped at:  step 9 of 12" in out
    assert "batch:       12 = 1 per rank x 12 micro-batch(es) x 1 rank(s)" in out
    assert tags(output) == [tag(8), tag(9)]
    assert (output / "model" / "model.safetensors").exists()
    earlier = resume.read(str(output))
    assert (earlier.ranks, earlier.job) == (1, ("a",))
    values = json.loads((output / "shardengine.json").read_text(encoding="utf-8"))
    assert values["train_batch_size"] == 12

    run(pools(1), "--resume", output, "--data", calm / "text.txt")
    undisturbed = tmp_path / "undisturbed"
    common = ["--config", tmp_path / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    run(pools(2), *common, "--steps", STEPS, "--output", undisturbed)
    assert [row[0] for row in curve(output)] == list(range(1, STEPS + 1))
    for now, before in zip(curve(output), curve(undisturbed), strict=True):
        assert now == pytest.approx(before, abs=CLOSE)
