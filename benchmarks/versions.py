"""Step time of this version of shardengine beside another one's, in one run: has a change made it slower?

``git worktree add ../before COMMIT && python -m benchmarks.versions ../before`` starts the ranks itself, one thread
each, pinned to its own core. Every rank holds both versions' engines of a stage, which take turns step by step; the
ratio is the median over paired rounds with its 95% bootstrap interval. The other version's package is copied under
another name. Both train on the same batches from the same weights; whether all losses have the same bits is said, too.

Needs 2 idle cores and about 4 minutes per stage; writes ``benchmarks/results/versions-<machine>.json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import collected, joined, leave
from benchmarks.reporting import MIN_ROUNDS, Ratio, machine, paired_ratio, result_path, table, verdict, write_result
from benchmarks.variants import VARIANTS, Ours
from benchmarks.workload import REFERENCE, Setting, batch_of, make_model

OTHER = "shardengine_before"
"""The name under which the other version is imported."""
WARMUP = 3
TARGET = 1.01
"""× the step time of the version before; ``reporting.verdict`` adds its slack."""


@dataclass(frozen=True)
class Plan:
    """What the ranks do. folder: of the other version's package, and of what they find · zero: of the config."""

    setting: Setting
    zero: dict[str, Any]
    rounds: int
    folder: str


def copy_renamed(checkout: Path, folder: Path) -> None:
    """Put the package of ``checkout`` into ``folder``, as ``OTHER``. Raises SystemExit where there is none."""
    package = checkout / "shardengine"
    if not (package / "__init__.py").exists():
        raise SystemExit(f"{checkout} holds no shardengine/__init__.py: expected another checkout of this project")
    target = folder / OTHER
    shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in target.rglob("*.py"):
        file.write_text(re.sub(r"\bshardengine\b", OTHER, file.read_text(encoding="utf-8")), encoding="utf-8")


def rank_main(rank: int, plan: Plan) -> None:
    """One rank: both engines in turn; seconds of every measured step and all losses, by version."""
    with joined(rank, plan.setting.ranks, plan.folder):
        sys.path.insert(0, plan.folder)
        other = importlib.import_module(OTHER)
        loops = {
            "now": Ours(make_model(plan.setting), plan.setting, zero=plan.zero),
            "before": Ours(make_model(plan.setting), plan.setting, zero=plan.zero, initialize=other.initialize),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        losses: dict[str, list[float]] = {name: [] for name in loops}
        for number in range(WARMUP + plan.rounds):
            batch = batch_of(plan.setting, rank, number)
            for name in sorted(loops, reverse=bool(number % 2)):
                dist.barrier()
                start = time.perf_counter()
                loss = loops[name].forward(batch)
                loops[name].backward(loss)
                loops[name].update()
                if number >= WARMUP:
                    seconds[name].append(time.perf_counter() - start)
                losses[name].append(float(loss.detach()))
        leave(rank, plan.folder, {"seconds": seconds, "losses": losses})
        for loop in loops.values():
            loop.close()


def compare(checkout: Path, setting: Setting, variant: str, rounds: int) -> dict[str, Any]:
    """One stage: seconds of each round (of its slowest rank), their ratio, and whether all losses are the same."""
    zero = VARIANTS[variant].build.keywords["zero"]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        copy_renamed(checkout, Path(folder))
        found = collected(rank_main, Plan(setting, zero, rounds, folder), setting.ranks, folder)
    seconds = {
        name: [max(times) for times in zip(*(rank["seconds"][name] for rank in found), strict=True)]
        for name in ("now", "before")
    }
    ratio = paired_ratio(seconds["now"], seconds["before"])
    same = all(rank["losses"]["now"] == rank["losses"]["before"] for rank in found)
    return {"ratio": asdict(ratio), "verdict": verdict(ratio, TARGET), "same_losses": same, "seconds": seconds}


def commit_of(checkout: Path) -> str:
    """What is checked out there, with "-dirty" where files differ from it; "" where git does not know."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def earlier_variants(result: dict[str, Any]) -> dict[str, Any]:
    """What the result file has of the same two versions, machine and setting."""
    path = result_path("versions", result)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    same = all(before.get(key) == result[key] for key in ("machine", "before", "now", "setting"))
    return dict(before["variants"]) if same and not result["now"].endswith("-dirty") else {}


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever is found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="another checkout of this project")
    ours = [name for name in VARIANTS if name.startswith("ours-")]
    parser.add_argument("--variants", nargs="+", choices=ours, default=ours, metavar="NAME", help=", ".join(ours))
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--layers", type=int, default=REFERENCE.layers)
    parser.add_argument("--hidden", type=int, default=REFERENCE.hidden)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    setting = Setting(**{**asdict(REFERENCE), "layers": options.layers, "hidden": options.hidden})
    result: dict[str, Any] = {
        "benchmark": "versions",
        "machine": machine(),
        "before": commit_of(options.checkout),
        "now": commit_of(Path(__file__).parent),
        "setting": asdict(setting),
        "target": TARGET,
        "variants": {},
    }
    for name in options.variants:
        result["variants"][name] = compare(options.checkout, setting, name, options.rounds)
    rows = [
        [name, str(Ratio(**row["ratio"])), row["verdict"], "yes" if row["same_losses"] else "no"]
        for name, row in result["variants"].items()
    ]
    print(table(["variant", "× before [95%]", f"target {TARGET}", "same losses"], rows))
    if not options.no_write:
        result["variants"] = {**earlier_variants(result), **result["variants"]}
        print(f"written to {write_result('versions', result)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
