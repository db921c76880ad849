"""Saving and loading a training: time beside the disk's own bandwidth, torch.save, torch DCP and DeepSpeed, in one run.

``python -m benchmarks.checkpoint`` starts the ranks itself, one thread each, as ``step.py`` does (ranks, libraries in
groups of processes, rotating order, paired rounds, bootstrap intervals) and writes ``checkpoint-<machine>.json``, whose
table ``python -m benchmarks.charts --markdown`` prints. It wants an idle machine and about 12 minutes; ``--rounds`` and
``--peer-rounds`` make it shorter, ``--savers`` picks some. DeepSpeed takes part where it is installed.

What is compared. The state is the weights and two moments of AdamW in fp32, after real steps. A round writes as many
bytes plainly in several ways, reads them, and lets every competitor save and load; *the disk* is the way with the best
median of the group's run. GB/s are bytes of state per second, whatever else a competitor writes, and × disk is the
disk's time over the competitor's. All writes end when the bytes are durable on all ranks (``savers.py`` says how for
each), into new files; all loads are cold (``disk.py``, [Note: Cold reads]) and fill what was just built. An
asynchronous save is two times: how long its call blocks, beside a plain copy of a rank's share of the state into warm
host buffers, and until it is on the disk, with nothing computed meanwhile. In the first round each load is proved: two
more steps give the losses that the saved training gives. Ours take CRC-32 sums of what they write and read, with isal
where it is installed (``pip install '.[fast]'``), as the result says under "packages".

Owns: the command line, the ratios and the report. ``checkpoint_ranks.py`` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_ranks import run_group, state_bytes
from benchmarks.disk import ways
from benchmarks.reporting import MIN_ROUNDS, Ratio, machine, paired_ratio, result_path, table, verdict, write_result
from benchmarks.savers import READERS, SAVERS, missing
from benchmarks.variants import INSTALL
from benchmarks.workload import REFERENCE, Setting

OURS, DISK = "shardengine", "the disk"
TARGET_DISK = 0.80
"""× the disk's bandwidth at least, saving and loading."""
TARGET_BLOCK = 1.0
"""× the copy to host at most, for the call of an asynchronous save."""
DISK_FOR = 24
"""Free bytes wanted per byte of state: what is kept, and all plain files, one per way, before and after."""
PEER_ROUNDS = 10
WARMUP = 2
"""The second asynchronous save is the first that finds both host buffers; both are warm afterwards."""
HEADER = (
    "|save GB/s|save × disk [95%]|target|load GB/s|load × disk [95%]|target|call blocks ms|× copy to host [95%]"
    "|target|MB written|peak MiB, save|peak MiB, load"
).split("|")


def groups_of(savers: Sequence[str]) -> list[list[str]]:
    """``savers`` by library, in order."""
    groups: dict[str, list[str]] = {}
    for name in savers:
        groups.setdefault(SAVERS[name].family, []).append(name)
    return list(groups.values())


def best_way(seconds: Mapping[str, Sequence[float]], verb: str) -> str:
    """The plain way with the best median. verb: write or read."""
    return min((key for key in seconds if key.startswith(f"{verb} ")), key=lambda key: statistics.median(seconds[key]))


def summarise(found: Sequence[Mapping[str, Any]], setting: Setting, targets: bool) -> dict[str, Any]:
    """Of one group: ``disk`` by way and the best of them, ``saves`` and ``loads`` by name, every ratio with its rounds.

    found: what each rank found; a round lasts as long as its slowest rank.
    """
    size = state_bytes(setting)
    seconds = {
        key: [max(values) for values in zip(*(rank["seconds"][key] for rank in found), strict=True)]
        for key in found[0]["seconds"]
    }
    peaks = {key: max(statistics.median(rank["peaks"][key]) for rank in found) for key in seconds}
    best = {verb: best_way(seconds, verb) for verb in ("write", "read")}

    def row(key: str, verb: str, ours: bool) -> dict[str, Any]:
        ratio = paired_ratio(seconds[best[verb]], seconds[key])
        return {
            **_speed(seconds[key], size),
            "peak_bytes": peaks[key],
            **_judged(ratio, TARGET_DISK if ours and targets else None, at_least=True),
        }

    saves, loads = {}, {}
    for name in (name for name in SAVERS if f"save {name}" in seconds):
        entry = SAVERS[name]
        ours = entry.family == OURS
        saves[name] = row(f"save {name}", "write", ours and not entry.asynchronous)
        saves[name]["written_bytes"] = found[0]["written"][name]
        if entry.asynchronous:
            block = seconds[f"block {name}"]
            judged = _judged(paired_ratio(block, seconds["copy"]), TARGET_BLOCK if ours and targets else None)
            saves[name]["block"] = {"median_s": statistics.median(block), **judged}
    for name in (name for name in READERS if f"load {name}" in seconds):
        loads[name] = row(f"load {name}", "read", name.startswith("ours"))
    plain = ("write ", "read ", "copy")
    return {
        "disk": {key: _speed(values, size) for key, values in seconds.items() if key.startswith(plain)},
        "best": best,
        "saves": saves,
        "loads": loads,
        "cached_before_loads": max(rank["warm"] for rank in found),
        "seconds": seconds,
    }


def _speed(seconds: Sequence[float], size: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"median_s": median, "gb_per_s": size / median / 1e9}


def _judged(ratio: Ratio, target: float | None, *, at_least: bool = False) -> dict[str, Any]:
    said = {} if target is None else {"target": target, "verdict": verdict(ratio, target, at_least=at_least)}
    return {"ratio": asdict(ratio), **said}


def cells(result: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table under ``HEADER``: per group the disk, its saves with their loads, and loads elsewhere."""
    rows = []
    for group in result["groups"]:
        best, disk = group["best"], group["disk"]
        speeds = {verb: disk[way]["gb_per_s"] for verb, way in best.items()}
        block = f"{disk['copy']['median_s'] * 1e3:.0f}" if "copy" in disk else ""
        copied = "1" if block else ""
        written = f"{result['state_bytes'] / 1e6:.0f}"
        rows.append([DISK, f"{speeds['write']:.2f}", "1", "", f"{speeds['read']:.2f}", "1", ""])
        rows[-1] += [block, copied, "", written, "", ""]
        for name in dict.fromkeys([*group["saves"], *group["loads"]]):
            saved, loaded = group["saves"].get(name), group["loads"].get(name)
            call = saved.get("block") if saved else None
            rows.append([
                name,
                *_speed_cells(saved),
                *_speed_cells(loaded),
                f"{call['median_s'] * 1e3:.0f}" if call else "",
                *_judged_cells(call),
                f"{saved['written_bytes'] / 1e6:.0f}" if saved else "",
                *(f"{row['peak_bytes'] / 2**20:.0f}" if row else "" for row in (saved, loaded)),
            ])  # fmt: skip
    return rows


def best_ways(result: Mapping[str, Any]) -> str:
    """What *the disk* is in each group, in one line."""
    verbs = [f"{key} ({group['rounds']} rounds)" for group in result["groups"] for key in group["best"].values()]
    return f"{DISK}, group by group: {'; '.join(verbs)}"


def _speed_cells(row: Mapping[str, Any] | None) -> list[str]:
    return [f"{row['gb_per_s']:.2f}" if row else "", *_judged_cells(row)]


def _judged_cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["", ""]
    ratio = row["ratio"]
    target = f"{row['target']:.2f}: {row['verdict']}" if "target" in row else ""
    return [f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]", target]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=" ".join(f"Savers of {package} need: {how}." for package, how in INSTALL.items()),
    )
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--peer-rounds", type=int, default=PEER_ROUNDS, help="of the other libraries (no targets)")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="rounds before the first measured one (at least 1)")
    parser.add_argument(
        "--savers", nargs="+", choices=list(SAVERS), metavar="NAME",
        help="any of: " + ", ".join(SAVERS) + " (default: all that are installed)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=REFERENCE.layers)
    parser.add_argument("--hidden", type=int, default=REFERENCE.hidden)
    parser.add_argument("--vocabulary", type=int, default=REFERENCE.vocabulary)
    parser.add_argument(
        "--directory", type=Path, default=Path(),
        help="on the disk to measure; a temporary directory in it is removed at the end (default: the current one)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, options.peer_rounds, options.warmup, options.layers) < 1:
        parser.error("--rounds, --peer-rounds, --warmup and --layers must be at least 1")
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 (one attention head has 64), got {options.hidden}")
    if not options.directory.is_dir():
        parser.error(f"--directory {options.directory}: expected a directory that is there")
    return options


def chosen_savers(named: Sequence[str] | None) -> list[str]:
    """The savers to run. Left out by default, with a sentence: what is not installed; refused where it was named."""
    absent = missing(list(named or SAVERS))
    for name, package in absent.items():
        if named:
            raise SystemExit(f"{name} needs {package}, which is not installed. To install it: {INSTALL[package]}")
        print(f"left out: {name} ({package} is not installed; to install it: {INSTALL[package]})", file=sys.stderr)
    return [name for name in SAVERS if name in (named or SAVERS) and name not in absent]


def measure(setting: Setting, savers: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the groups in a temporary directory, which goes whatever happens."""
    wanted, free = DISK_FOR * state_bytes(setting), shutil.disk_usage(options.directory).free
    if free < wanted:
        raise SystemExit(
            f"{options.directory.resolve()}: {free / 1e9:.1f} GB are free and about {wanted / 1e9:.1f} GB are needed: "
            "choose another --directory or a smaller model"
        )
    found = []
    groups = groups_of(savers)
    for number, group in enumerate(groups):
        print(f"group {number + 1} of {len(groups)}: {', '.join(group)}", file=sys.stderr)
        rounds = options.rounds if SAVERS[group[0]].family == OURS else options.peer_rounds
        with tempfile.TemporaryDirectory(prefix="shardengine-bench-", dir=options.directory) as name:
            place = Path(name).resolve()
            plain = ways(place, setting.ranks)
            ranks = run_group(setting, group, plain, rounds, options.warmup, place)
        found.append({"rounds": rounds, **summarise(ranks, setting, targets=setting == REFERENCE)})
        if found[-1]["cached_before_loads"] > 0:
            print("the page cache could not be dropped here: loads are warm in part", file=sys.stderr)
    return found


def write(result: dict[str, Any], setting: Setting) -> str:
    """Keep a result of the reference setting that has all savers of the file that is there."""
    if setting != REFERENCE:
        return "not written: results are kept for the reference setting only"
    path = result_path("checkpoint", result)
    held = json.loads(path.read_text(encoding="utf-8"))["groups"] if path.exists() else []
    new = {name for group in result["groups"] for name in group["saves"]}
    lost = [name for group in held for name in group["saves"] if name not in new]
    if lost:
        return f"not written: {os.path.relpath(path)} also holds {', '.join(lost)}; run these too, or delete the file"
    return f"written to {os.path.relpath(write_result('checkpoint', result))}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    setting = Setting(
        REFERENCE.ranks, options.layers, options.hidden, options.vocabulary, REFERENCE.batch, REFERENCE.sequence
    )
    savers = chosen_savers(options.savers)
    packages = sorted({SAVERS[name].package or "" for name in savers} - {""})
    packages += ["isal"] if find_spec("isal") else []  # which takes the checksums of ours, see docs/decisions.md
    result: dict[str, Any] = {
        "benchmark": "checkpoint",
        "machine": machine(),
        "packages": {package: metadata.version(package) for package in packages},
        "setting": asdict(setting) | {"parameters": setting.parameters(), "threads_per_rank": 1},
        "state_bytes": state_bytes(setting),
        "warmup": options.warmup,
    }
    print(
        f"GPT-2, {setting.parameters() / 1e6:.1f}M parameters, {state_bytes(setting) / 1e6:.0f} MB of state (fp32, "
        f"AdamW), {setting.ranks} ranks × 1 thread, {result['machine']['processor']}",
        file=sys.stderr,
    )
    result["groups"] = measure(setting, savers, options)
    print(json.dumps(result, indent=1) if options.json else f"{table(HEADER, cells(result))}\n{best_ways(result)}")
    print("not written, as asked" if options.no_write else write(result, setting), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
