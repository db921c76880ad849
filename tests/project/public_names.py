"""The names that users see, collected by using the library: config keys, methods, keys of results, files, options.

`test_public_names.py` beside it compares them with `tests/data/public_names.json`, so that no renaming inside reaches a
user unnoticed. After a change that is meant to be seen, `python -m tests.project.public_names` writes the file anew.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardengine
from shardengine import errors
from shardengine.app import cli
from shardengine.config import json_schema
from tests.support import cases

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "data" / "public_names.json"
RANKS = 2
USED_IN_PROGRAMS = (
    "shardengine.lion.Lion",
    "shardengine.muon.MuonWithAdamW",
    "shardengine.offload.CPUAdam",
    "shardengine.monitors.Monitor",
)
COMMANDS = ("train", "run", "config", "env", "export", "inspect", "import", "plan")


def keys_of(schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """The dotted keys of a JSON schema."""
    for name, of in schema.get("properties", {}).items():
        yield before + name
        for each in (of, *of.get("anyOf", ()), *of.get("oneOf", ())):
            yield from keys_of(each, f"{before}{name}.")


def public(of: Any) -> list[str]:
    """Public attributes, sorted; a callable with the names of its parameters."""
    found = []
    for name in sorted(name for name in dir(of) if not name.startswith("_")):
        value = inspect.getattr_static(of, name)
        found.append(name + (str(tuple(inspect.signature(value).parameters)) if inspect.isfunction(value) else ""))
    return found


def options_of(command: str) -> list[str]:
    """The options in the help of ``command``."""
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "500")  # no name is broken over two lines
        cli.main([command, "--help"])
    return sorted(set(re.findall(r"--[a-z][a-z-]*", text.getvalue())))


def without_numbers(names: Any) -> list[str]:
    """Sorted, once each, with N for numbers."""
    return sorted({re.sub(r"\d+", "N", name) for name in names})


def json_keys(value: Any, before: str = "") -> Iterator[str]:
    """The dotted keys of JSON data; the entries of a list under one."""
    for name, of in value.items() if isinstance(value, dict) else ():
        yield f"{before}{name}"
        yield from json_keys(of, f"{before}{name}.")
    for of in value if isinstance(value, list) else ():
        yield from json_keys(of, f"{before}[].")


def from_a_run(folder: str) -> dict[str, list[str]]:
    """On one rank of a run: the keys of results, the files that were written, and what is in them."""
    memory: set[str] = set()
    traffic: set[str] = set()
    states: set[str] = set()
    purposes: set[str] = set()
    runs: dict[str, dict[str, Any]] = {
        "0": {}, "3": {"bf16": {"enabled": True}}, "2": {"zero": {"offload_optimizer": {"device": "cpu"}}}
    }  # fmt: skip
    for stage, options in runs.items():
        engine: Any = cases.make_engine(cases.make_mlp(), cases.config_of(stage, **options))
        with engine.trace(Path(folder) / "trace.json"):
            cases.run_micro_batch(engine, cases.loss_of, 0, 0)
        memory |= engine.memory().keys()
        traffic |= engine.traffic().keys()
        purposes |= engine.traffic()["by_purpose_total"].keys()
        with engine.full_optimizer_state() as whole:
            states |= {key for of in whole.values() for key in of or ()}
        engine.save_checkpoint(Path(folder) / f"stage{stage}")
        engine.close()
    events = json.loads((Path(folder) / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    written = {path.relative_to(folder).as_posix(): path for path in files}
    found = {
        "memory()": sorted(memory),
        "traffic()": sorted(traffic),
        "purposes in traffic()": sorted(purposes),
        "full_optimizer_state()": sorted(states),
        "files": without_numbers(written),
        "trace lanes": sorted({event["args"]["name"] for event in events if event["name"] == "thread_name"}),
        "trace events": without_numbers(event["name"].split(" ")[0] for event in events if event["ph"] == "X"),
    }
    for name, path in written.items():
        if path.suffix == ".json" and name.startswith("stage3"):
            found[f"file {without_numbers([name])[0]}"] = without_numbers(json_keys(json.loads(path.read_text())))
    return found


def collected(folder: str) -> dict[str, list[str]]:
    """All of them; on every rank."""
    engine: Any = cases.make_engine(nn.Linear(2, 2), cases.config_of("0"))
    found = {
        "package": sorted(shardengine.__all__),
        "initialize": list(inspect.signature(shardengine.initialize).parameters),
        "launch": list(inspect.signature(shardengine.launch).parameters),
        "engine": sorted({*public(type(engine)), *(name for name in vars(engine) if not name.startswith("_"))}),
        "optimizer": sorted(name for name in shown_of_the_optimizer() if hasattr(engine.optimizer, name)),
        "errors": sorted(name for name, value in vars(errors).items() if inspect.isclass(value)),
        "used in programs": list(USED_IN_PROGRAMS),
        "config": sorted(set(keys_of(json_schema()))),
        **{f"options of {command}": options_of(command) for command in COMMANDS},
        "environment": sorted(environment()),
    }
    engine.close()
    return {**found, **from_a_run(folder)}


def shown_of_the_optimizer() -> set[str]:
    """What README, docs and examples use of ``engine.optimizer``."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    return {
        name for path in texts for name in re.findall(r"engine\.optimizer\.(\w+)", path.read_text(encoding="utf-8"))
    }


def environment() -> set[str]:
    """The variables that the package reads."""
    sources = Path(shardengine.__file__).parent.rglob("*.py")
    return {name for path in sources for name in re.findall(r"\bSHARDENGINE_[A-Z_]+", path.read_text(encoding="utf-8"))}


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = shardengine.launch(collected, RANKS, (folder,))[0]
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {FILE}")


if __name__ == "__main__":
    from tests.project.public_names import main as as_a_module

    as_a_module()
