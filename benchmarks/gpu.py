"""What one GPU can tell in three times ten minutes: ``make gpu PART=1``, 2 and 3, or all of them in turn.

A part is a list of blocks (``gpu_blocks.py``), each a command in processes of its own with seconds that it may take,
after which they are killed; what a block leaves of its time the later ones have. A part ends within ``PART_S``. A block
that fails is a row of the report, and the next one begins; the exit status is 0 unless the report itself could not be
made.

``build/gpu/part-N.json`` has a row per block: its command, its state (done · failed · timed out · not possible here),
why, its seconds, what it found as numbers, and the ends of its output; ``part-N.md`` says the same for readers. Both
are written after every block. ``gpu-MACHINE.json`` holds the numbers of all parts of one machine, there and, on a GPU,
in ``benchmarks/results/``. ``--copy-to`` puts the part's files, and traces, into another folder after every block.

A part that is run again goes on where it was: a block that is done, by the same command from the same sources on such a
machine, is not run again (``FRESH=1``, ``--fresh``: it is). ``--device cpu --tiny`` tries all this where no GPU is.

Owns: time, processes, the report. Imports no torch: a GPU has no context but the block's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_blocks import BLOCKS, GPU, PARTS, Block, document

ROOT = Path(__file__).resolve().parents[1]
PART_S = 575.0
"""Of a part, from its start to its last report."""
LEAST_S = 8.0
"""A block is not begun with less."""
GRACE_S = 2.0
"""Between the signal that asks and the one that ends."""
TAIL = 4000
"""Characters of each output that the report has."""
MACHINE_S = 60.0
RESULTS = Path(__file__).resolve().parent / "results"
SOURCES = ("shardengine", "benchmarks", "tests")
SUFFIXES = {".py", ".cpp", ".h", ".json", ".toml"}

PATHS = re.compile(r"(?<![\w.~])/(?:work|root|home|tmp)/[^\s\"'\\]*")
"""Those of one machine, which errors name."""

DONE, FAILED, TIMED_OUT, NOT_POSSIBLE = "done", "failed", "timed out", "not possible here"
Row = dict[str, Any]

FACTS = """
import json, sys, torch
from benchmarks.reporting import machine
device = sys.argv[1]
if device == "cuda" and not torch.cuda.is_available():
    sys.exit("torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
print(json.dumps(machine(device)))
"""


@dataclass(frozen=True)
class Output:
    """Of a command that has ended, or was ended: code None."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Output:
    """Run it in the repository's root, in a process group of its own, which is ended after ``seconds`` at most."""
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **environment}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        finally:
            _signal(process, signal.SIGKILL)  # whatever it has left behind, too
            process.wait()
        seconds = time.monotonic() - start
        stdout.seek(0)
        stderr.seek(0)
        said = stdout.read().decode(errors="replace"), stderr.read().decode(errors="replace")
    return Output(code, said[0], said[1], seconds)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all of them have ended
        os.killpg(process.pid, number)


def sources() -> str:
    """A digest of the code that runs, whether it is committed or not."""
    total = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and "results" not in path.parts and path.is_file():
                total.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def commit() -> str | None:
    """That of the checkout; None where it is none, or git is not there."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() or None


def machine(device: str) -> dict[str, Any]:
    """Of ``reporting``, found out by another process. SystemExit with its reason where there is no such device."""
    found = run([sys.executable, "-c", FACTS, device], MACHINE_S, {})
    if found.code != 0:
        said = found.stderr.strip().splitlines()
        raise SystemExit(f"benchmarks.gpu: {said[-1] if said else f'no answer within {MACHINE_S:g} s'}")
    facts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return facts


def row_of(block: Block, output: Output, limit: float) -> Row:
    """What is reported of a block that ran."""
    try:
        found, unread = block.read(output.stdout), None
    except Exception as error:  # the command may have ended before it said anything
        found, unread = {}, f"its output could not be read: {type(error).__name__}: {error}".splitlines()[0]
    if output.code is None:
        state, why = TIMED_OUT, f"it was ended after {limit:.0f} s"
    elif output.code:
        state, why = FAILED, f"exit code {output.code}: {_last(output)}"
    elif unread:
        state, why = FAILED, unread
    elif found.get("skipped") and not found.get("passed"):
        state, why = NOT_POSSIBLE, f"all {found['skipped']} tests were skipped"
    else:
        state, why = DONE, None
    tails = {"stdout": output.stdout[-TAIL:], "stderr": output.stderr[-TAIL:]}
    row = {"state": state, "why": why, "seconds": round(output.seconds, 1), "found": found, **tails}
    if "--json" in block.command and state == DONE:
        row["whole"] = document(output.stdout)
    return row


def _last(output: Output) -> str:
    said = [line.strip() for text in (output.stdout, output.stderr) for line in text.splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"(E\s+)?\w*(Error|Exception)\b", line)]
    return (errors or said or ["it said nothing"])[-1][:300]


class Report:
    """The rows of one part, in files that are complete after each of them. folder: where they are · copies: where else.

    facts: of this run; rows of another machine, or of other sources, are not taken over.
    """

    def __init__(self, part: int, folder: Path, copies: Path | None, facts: dict[str, Any]) -> None:
        self.part, self.folder, self.copies, self.facts = part, folder, copies, facts
        self.path = folder / f"part-{part}.json"
        self.rows: dict[str, Row] = {}
        self.earlier = self._earlier()
        self.kept = facts["device"] == GPU

    def _earlier(self) -> dict[str, Row]:
        held = _read(self.path)
        same = all(held.get(key) == self.facts[key] for key in ("machine", "sources", "device"))
        return {row["name"]: row for row in held["blocks"]} if same else {}

    def done_before(self, block: Block, command: str) -> Row | None:
        """The row of an earlier run that need not be run again."""
        row = self.earlier.get(block.name)
        return row if row and row["state"] == DONE and row["command"] == command else None

    def add(self, name: str, command: str, row: Row) -> None:
        """Write the files anew, with one row more."""
        self.rows[name] = {"name": name, "command": command, **row}
        waiting = [row for name, row in self.earlier.items() if name not in self.rows]
        whole = {"benchmark": "gpu", "part": self.part, **self.facts, "blocks": [*self.rows.values(), *waiting]}
        self.folder.mkdir(parents=True, exist_ok=True)
        _put(self.path, json.dumps(whole, indent=1) + "\n")
        _put(self.path.with_suffix(".md"), text_of(whole))
        self._together(whole)
        if self.copies is not None:
            self.copies.mkdir(parents=True, exist_ok=True)
            for path in self.folder.iterdir():
                others = path.name.startswith("part-") and path.stem != self.path.stem
                if path.is_file() and not others and self.folder != self.copies:
                    shutil.copy2(path, self.copies)

    def _together(self, whole: dict[str, Any]) -> None:
        """This part beside the others of such a machine, without what was printed."""
        name = f"gpu-{self.facts['machine']['name']}.json"
        parts: dict[str, Any] = {}
        for path in (RESULTS / name, self.folder / name):
            held = _read(path)
            parts |= held.get("parts", {}) if held.get("machine") == whole["machine"] else {}
        short = [{key: row[key] for key in row if key not in ("whole", "stdout", "stderr")} for row in whole["blocks"]]
        parts |= {str(self.part): {key: whole[key] for key in ("commit", "sources", "device")} | {"blocks": short}}
        found = {"benchmark": "gpu", "machine": whole["machine"], "parts": dict(sorted(parts.items()))}
        for folder in [self.folder, *([RESULTS] if self.kept else [])]:
            _put(folder / name, PATHS.sub("PATH", json.dumps(found, indent=1)) + "\n")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _put(path: Path, text: str) -> None:
    """Complete or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def text_of(whole: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    found = [f"# Part {whole['part']}: {PARTS[whole['part']]}", ""]
    found += [f"{json.dumps(whole['machine'])}, sources {whole['sources']}, commit {whole['commit']}", ""]
    found += ["| block | state | s | why |", "|---|---|---|---|"]
    for row in whole["blocks"]:
        found.append(f"| {row['name']} | {row['state']} | {row['seconds']} | {(row['why'] or '').replace('|', '/')} |")
    for row in whole["blocks"]:
        found += ["", f"## {row['name']}: {row['state']}", "", f"    {row['command']}", ""]
        found += ["```json", json.dumps(row["found"], indent=1), "```"] if row["found"] else []
        for name in ("stdout", "stderr"):
            if row.get(name, "").strip() and "whole" not in row:
                found += ["", f"end of {name}:", "", "```", row[name].strip().replace("```", "'''"), "```"]
    return "\n".join(found) + "\n"


def run_part(
    report: Report, blocks: Sequence[Block], end: float, *, fresh: bool, run: Callable[..., Output] = run
) -> None:
    """Every block once, until ``end`` (of ``time.monotonic``), with a row for each."""
    device, folder = report.facts["device"], str(report.folder)
    for number, block in enumerate(blocks):
        later = sum(other.seconds for other in blocks[number + 1 :])
        missing = block.why_not(device)
        words = [] if missing else block.arguments(device, folder)
        command = block.shown(device)
        if missing:
            row = {"state": NOT_POSSIBLE, "why": missing, "seconds": 0.0, "found": {}}
        elif not fresh and (before := report.done_before(block, command)):
            row = {key: before[key] for key in before if key not in ("name", "command")}
        else:
            left = end - time.monotonic()
            limit = min(left - GRACE_S, max(block.seconds, left - later))
            if limit < min(LEAST_S, block.seconds):
                row = {"state": TIMED_OUT, "why": "not begun: the part's time was over", "seconds": 0.0, "found": {}}
            else:
                print(f"{block.name}: at most {limit:.0f} s", file=sys.stderr, flush=True)
                row = row_of(block, run(words, limit, block.environment), limit)
        report.add(block.name, command, row)
        why = f": {row['why']}" if row["why"] else ""
        print(f"{block.name}: {row['state']}, {row['seconds']:g} s{why}", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", type=int, choices=list(PARTS), help="default: all in turn")
    parser.add_argument("--fresh", action="store_true", help="run what is done again")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER", help="of the reports")
    parser.add_argument("--copy-to", type=Path, metavar="FOLDER", help="where copies of all files go, after each block")
    parser.add_argument("--blocks", nargs="+", metavar="NAME", help="these alone; see benchmarks/gpu_blocks.py")
    parser.add_argument("--part-seconds", type=float, default=PART_S, metavar="SECONDS", help="that a part may take")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=GPU, help="cpu: with --tiny, to try the program")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    options = parser.parse_args(argv)
    if (options.device == GPU) is options.tiny:
        parser.error("--device cpu and --tiny: expected both or none")
    names = [block.name for block in BLOCKS]
    if unknown := [name for name in options.blocks or () if name not in names]:
        parser.error(f"--blocks: expected some of {', '.join(names)}, got {', '.join(unknown)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the blocks did."""
    start = time.monotonic()
    options = parse(argv)
    facts = {"machine": machine(options.device), "device": options.device, "sources": sources(), "commit": commit()}
    for part in [options.part] if options.part else PARTS:
        blocks = [block for block in BLOCKS if block.part == part and block.name in (options.blocks or [block.name])]
        if not blocks:
            continue
        report = Report(part, options.out.resolve(), options.copy_to and options.copy_to.resolve(), facts)
        print(f"part {part}, {PARTS[part]}: {report.path.with_suffix('.md')}", flush=True)
        run_part(report, blocks, start + options.part_seconds, fresh=options.fresh)
        start = time.monotonic()
    return 0


if __name__ == "__main__":
    sys.exit(main())
