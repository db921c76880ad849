"""The source keeps its own rules, and each rule can fail: every checker is fed a small bad source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import source_rules as rules

ROOT = Path(__file__).resolve().parents[2]
SOURCES = rules.package_sources(ROOT)
PATHS = {rules.module_of(path): path for path in SOURCES}
MODULES = frozenset(PATHS)
KNOWN = MODULES | {"shardengine.stages.record"}

TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".yml",
    ".yaml",
    ".cfg",
    ".sh",
    ".ipynb",
    ".css",
    ".js",
    ".html",
}
TEXT_NAMES = {"Makefile", "LICENSE", ".gitignore", "Dockerfile", ".dockerignore", "run"}
TEXT_FOLDERS = ("shardengine", "tests", "benchmarks", "configs", "docs", "examples", ".ci", ".github")
OPTIONAL_IMPORTS = (
    "triton", "transformers", "tokenizers", "matplotlib", "tqdm", "accelerate", "peft", "trl", "lightning", "cpuinfo",
)  # fmt: skip


def tracked_texts() -> Iterator[Path]:
    """Every text file of the project: those at the top, and all below the folders that belong to it."""
    candidates = [*ROOT.iterdir(), *(file for name in TEXT_FOLDERS for file in (ROOT / name).rglob("*"))]
    for file in sorted(candidates):
        if file.is_file() and (file.suffix in TEXT_SUFFIXES or file.name in TEXT_NAMES):
            yield file


def report(found: list[str]) -> None:
    """Fail with all violations at once."""
    assert not found, "\n".join(["", *found])


def test_imports_go_down() -> None:
    report([text for path, source in SOURCES.items() for text in rules.import_order(path, source, MODULES)])


def test_other_packages_take_what_a_front_door_shows() -> None:
    report(rules.names_past_doors(SOURCES))
    doors = {"comm/__init__.py": "__all__ = ['Mesh']", "ddp/a.py": "from shardengine.comm import Mesh, store_board"}
    assert rules.names_past_doors(doors) == ["ddp/a.py:1: store_board is not in shardengine.comm.__all__"]


def test_no_import_cycles() -> None:
    report(rules.import_cycles(SOURCES))


FILE_RULES = (
    rules.distributed_operations,
    rules.hook_registrations,
    rules.stage_comparisons,
    rules.budgets,
    rules.documentation,
)


@pytest.mark.whole
@pytest.mark.parametrize("rule", FILE_RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule) -> None:
    report([text for path, source in SOURCES.items() for text in rule(path, source)])


def test_no_machine_paths_and_no_open_ends() -> None:
    files = list(tracked_texts())
    assert ROOT / "pyproject.toml" in files and ROOT / "tests" / "project" / "test_source_rules.py" in files
    found = [
        text
        for file in files
        for text in rules.forbidden_text(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    ]
    report(found)


def test_private_names_of_others_are_decisions() -> None:
    allowed = {"_exit", "_SubParsersAction", "_C"}  # of the standard library, and where torch's names are
    told = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    found = {name for name in rules.foreign_private_names(SOURCES) if name.startswith("_")} - allowed
    assert "_current_graph_task_id" in found
    report([f"{name}: expected its reason in docs/decisions.md" for name in sorted(found) if f"`{name}`" not in told])


def test_a_private_name_of_others_is_seen() -> None:
    sources = {"a.py": "import torch\nfrom torch.x import _y\nz = torch._w() + self._own", "b.py": "self._own = 1"}
    assert rules.foreign_private_names(sources) == {"_w", "_y"}


def loaded_by(statement: str) -> set[str]:
    """Top-level names in sys.modules after ``statement`` in a fresh process."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_shardengine_loads_no_optional_package() -> None:
    assert "torch" not in loaded_by("import shardengine")
    extra = loaded_by("import torch; from shardengine import *") - loaded_by("import torch")
    assert "shardengine" in extra
    assert not extra.intersection(OPTIONAL_IMPORTS)


def test_loaded_by_sees_an_optional_import() -> None:
    assert "cpuinfo" in loaded_by("import cpuinfo") - loaded_by("pass")


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("stages/record.py", "from shardengine.sharding import Bucket", "stages imports sharding"),
        ("stages/record.py", "from shardengine import sharding", "stages imports sharding"),
        ("stages/record.py", "import shardengine.sharding as s", "stages imports sharding"),
        ("stages/record.py", "from ..sharding import Bucket", "stages imports sharding"),
        ("ddp/reducer.py", "from shardengine.sharding.bucket import Bucket", "past the front door of sharding"),
        ("ddp/reducer.py", "from shardengine import initialize", "ddp imports __init__"),
        ("ddp/reducer.py", "from ..engine import Engine", "ddp imports engine"),
        ("errors.py", "import shardengine.stages", "errors imports stages"),
        ("runtime/unit.py", "def f():\n    from shardengine.sharding import Bucket", "inside a function"),
        ("runtime/unit.py", "from shardengine.helpers import x", "not in IMPORT_ORDER"),
        ("helpers.py", "x = 1", "not in IMPORT_ORDER"),
    ],
)
def test_import_order_can_fail(path: str, source: str, complaint: str) -> None:
    found = rules.import_order(path, source, KNOWN)
    assert len(found) == 1 and complaint in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/unit.py", "import torch\nfrom shardengine.sharding import Bucket\nfrom shardengine import errors"),
        ("app/export.py", "from shardengine.interchange.stored import find"),
        ("stages/zero.py", "from shardengine.stages.record import Stage"),
        ("stages/__init__.py", "from .record import Stage"),
        ("app/cli.py", "def main():\n    from shardengine.engine import initialize"),
        ("app/loop.py", "import shardengine"),
    ],
)
def test_import_order_allows_what_goes_down(path: str, source: str) -> None:
    assert rules.import_order(path, source, KNOWN) == []


def test_import_cycles_can_fail() -> None:
    found = rules.import_cycles({"ddp/a.py": "from shardengine.ddp import b", "ddp/b.py": "import shardengine.ddp.a"})
    assert found == ["import cycle: shardengine.ddp.a → shardengine.ddp.b → shardengine.ddp.a"]
    assert rules.import_cycles({"ddp/a.py": "from shardengine.ddp import b", "ddp/b.py": ""}) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("unit.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("unit.py", "from torch import distributed as d\nd.all_to_all_single(x, y)"),
        ("unit.py", "import torch\ntorch.distributed.broadcast(x, 0)"),
        ("unit.py", "from torch.distributed import all_gather_into_tensor as f"),
        ("unit.py", "from torch.distributed.distributed_c10d import reduce_scatter_tensor"),
        ("unit.py", "import torch.distributed as dist\ngetattr(dist, name)(x)"),
        ("unit.py", "import torch.distributed as dist\ndist.barrier()"),
        ("engine.py", "import torch.distributed as dist\ndist.new_group([0])"),
        ("comm/mesh.py", "import torch.distributed as dist\ndist.all_gather_object(a, b)"),
        ("comm/wire.py", "import torch.distributed as dist\ndist.new_group([0])"),
        ("comm/collectives.py", "import torch.distributed as dist\ndist.all_to_all_single(x, y)"),
    ],
)
def test_distributed_operations_can_fail(path: str, source: str) -> None:
    assert len(rules.distributed_operations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comm/wire.py", "import torch.distributed as dist\ndist.all_to_all_single(x, y)"),
        ("comm/mesh.py", "import torch.distributed as dist\ndist.init_process_group('gloo')"),
        ("comm/group_kind.py", "import torch.distributed as dist\ndist.new_group([0])"),
        ("engine.py", "import torch.distributed as dist\ndist.is_initialized()"),
        ("unit.py", "'''calls all_reduce'''\ncollectives.all_reduce(x)"),
    ],
)
def test_distributed_operations_allows(path: str, source: str) -> None:
    assert rules.distributed_operations(path, source) == []


@pytest.mark.parametrize(
    "call",
    [
        "p.register_hook(f)",
        "p.register_post_accumulate_grad_hook(f)",
        "node.register_prehook(f)",
        "m.register_forward_pre_hook(f)",
        "self.module.register_forward_pre_hook(f)",
        "torch.autograd.graph.register_multi_grad_hook(ps, f)",
    ],
)
def test_hook_registrations_can_fail(call: str) -> None:
    assert len(rules.hook_registrations("unit.py", call)) == 1
    assert rules.hook_registrations("runtime/hooks.py", call) == []
    assert rules.hook_registrations("lion.py", "self.register_load_state_dict_pre_hook(f)") == []


@pytest.mark.parametrize(
    "source",
    [
        "a = stage == 3",
        "a = config.zero_optimization.stage >= 2",
        "a = self.stage in (1, 2)",
        "a = stage.name != '3k'",
        "a = 2 < engine.zero_optimization_stage()",
        "a = {0: f, 3: g}[stage]",
        "if config.stage:\n    pass",
        "a = not stage",
        "match stage:\n    case 3:\n        pass",
    ],
)
def test_stage_comparisons_can_fail(source: str) -> None:
    assert len(rules.stage_comparisons("engine.py", source)) == 1
    assert rules.stage_comparisons("stages/record.py", source) == []


def test_stage_comparisons_allows_letters_and_none() -> None:
    source = "a = stage.gradients is Placement.SHARDED\nb = stage is None\nc = stage_of(config.stage)\n'stage == 3'"
    assert rules.stage_comparisons("engine.py", source) == []


def test_budgets_can_fail() -> None:
    assert rules.budgets("unit.py", "x = 1\n" * 1000) == [], "a file may be as long as its subject"
    assert len(rules.budgets("unit.py", "def f():\n" + "    x = 1\n" * 60)) == 1
    assert rules.budgets("unit.py", "def f():\n" + "    x = 1\n" * 59) == []
    assert len(rules.budgets("unit.py", "def f(a, b, c, /, d, e, *rest, g, h, i=0, **more): ...")) == 1
    assert rules.budgets("unit.py", "class A:\n    def f(self, a, b, c, d, e, *rest, g, h, **more): ...") == []


def test_only_kernels_may_have_more_parameters() -> None:
    many = "def f(a, b, c, d, e, g, h, i): ..."
    assert rules.budgets("kernels/a.py", f"@triton.jit\n{many}") == []
    assert rules.budgets("kernels/a.py", f"@triton.jit(do_not_specialize=['a'])\n{many}") == []
    for other in ("torch.jit", "jit", "functools.cache", "triton.heuristics({})", "other(triton.jit)"):
        assert len(rules.budgets("kernels/a.py", f"@{other}\n{many}")) == 1, other
    long = "@triton.jit\ndef f(a):\n" + "    x = 1\n" * 60
    assert len(rules.budgets("kernels/a.py", long)) == 1, "the other budgets hold for kernels, too"


def test_an_attribute_is_assigned_where_its_class_is() -> None:
    report(rules.assigned_from_outside(SOURCES))
    one = "class A:\n    x: int\n    def f(self):\n        self.y = 1\ndef g(a):\n    a.x = a.y = 2"
    assert rules.assigned_from_outside({"one.py": one, "two.py": "def f(b):\n    b.z = 1"}) == []
    for line in ("a.x = 1", "a.b.y += 1", "a.x, b = 1, 2", "self.a.y: int = 1", "for a.x in b: ..."):
        assert len(rules.assigned_from_outside({"one.py": one, "two.py": line})) == 1, line
    own = "class B:\n    def f(self):\n        self.x = 1"
    assert rules.assigned_from_outside({"one.py": one, "two.py": own}) == []


def test_a_short_module_of_one_importer_has_a_reason() -> None:
    report(rules.slivers(SOURCES, PATHS))
    modules = {"p.a": "a.py", "p.b": "b.py", "p.c": "c.py"}
    sources = {"a.py": "x = 1", "b.py": "from p import a", "c.py": ""}
    (found,) = rules.slivers(sources, modules)
    assert found.startswith("a.py: 1 lines that b.py alone imports")
    assert rules.slivers(sources | {"c.py": "from p.a import x"}, modules) == []
    assert rules.slivers(sources | {"a.py": "x = 1\n" * 80}, modules) == []
    assert {path for path in rules.SLIVERS if path not in SOURCES} == set(), "reasons for what is not there"


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "'''doc'''\ndef f() -> int:\n    return 1",
        "'''doc'''\ndef f():\n    '''doc'''",
        "'''doc'''\nclass A:\n    x = 1",
        "'''doc'''\nclass A:\n    '''doc'''\n    def f(self) -> None: ...",
    ],
)
def test_documentation_can_fail(source: str) -> None:
    assert len(rules.documentation("unit.py", source)) == 1


def test_documentation_leaves_private_names_alone() -> None:
    assert rules.documentation("unit.py", "'''doc'''\ndef _f():\n    def g(): ...\nclass _A: ...") == []


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_forbidden_text_can_fail(folder: str) -> None:
    assert len(rules.forbidden_text("a.md", f"see /{folder}/someone/file")) == 1
    assert len(rules.forbidden_text("a.md", f"'/{folder}'")) == 1
    assert rules.forbidden_text("a.md", f"see example.com/{folder}/x and net{folder}") == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_forbidden_words_can_fail(word: str) -> None:
    assert len(rules.forbidden_text("a.py", f"x = 1  # {word}: later")) == 1
    assert rules.forbidden_text("a.py", f"{word}S = ()") == []
