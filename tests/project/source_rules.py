"""The rules of the source, as functions from a source text to a list of sentences (empty: the rule is kept).

Owns: the import order, the one-file rules, the budgets, the docstring rule and the rule on tracked text. Code is
read as a syntax tree, so that a word in a docstring is no violation. ``test_source_rules.py`` beside it applies the
rules to the project and proves of each that it can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "shardengine"

# Each package (or file beside them) may import only what stands above it, and another package only through its front
# door, its __init__.py. Inside a package the files may import each other as long as there is no cycle.
IMPORT_ORDER = (
    "errors", "uncaught", "version", "trace", "other_engines",
    "config", "stages", "kernels", "offload", "comm", "loading", "sharding", "ddp", "runtime", "optim", "budget",
    "core", "checkpoint", "engine", "interchange", "planner", "start", "pretrained", "lion", "muon", "monitors",
    "__init__", "compat", "integrations", "app", "run", "__main__",
)  # fmt: skip
NO_FRONT_DOOR = ("interchange", "compat", "integrations", "app")
"""Packages of which the files are imported one by one: nobody needs all of them, and some need other libraries."""
LAZY_IMPORTS_ALLOWED = ("app",)
"""Entries that may import our own package inside a function (so that ``--help`` and bad usage answer at once)."""
LAZY_IMPORTS_EXCEPTIONS: tuple[str, ...] = ("start.py", "compat/for_children/sitecustomize.py")
"""Single files with the same right: ``initialize`` loads the planner only if the config leaves
a value to it; the file that runs at the start of every Python process imports nothing before it is needed."""

DATA_OPERATIONS = frozenset(
    "all_reduce all_reduce_coalesced reduce broadcast broadcast_object_list all_gather all_gather_object "
    "all_gather_coalesced all_gather_into_tensor all_gather_single gather gather_object scatter scatter_object_list "
    "reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single send recv isend irecv "
    "send_object_list recv_object_list batch_isend_irecv P2POp".split()
)
GROUP_OPERATIONS = frozenset(
    "new_group new_subgroups new_subgroups_by_enumeration split_group init_device_mesh DeviceMesh".split()
)
LIFETIME_OPERATIONS = frozenset("init_process_group destroy_process_group barrier monitored_barrier".split())
ALLOWED_OPERATIONS: Mapping[str, frozenset[str]] = {
    "comm/wire.py": DATA_OPERATIONS,
    "comm/mesh.py": LIFETIME_OPERATIONS | {"DeviceMesh"},
    **dict.fromkeys(  # which users give
        ("start.py", "engine/arguments.py", "engine/engine.py", "core/shard_groups.py"), frozenset({"DeviceMesh"})
    ),
    "comm/group_kind.py": GROUP_OPERATIONS | LIFETIME_OPERATIONS,
    "comm/launcher.py": LIFETIME_OPERATIONS,
    "app": LIFETIME_OPERATIONS,
    "compat/deepspeed/processes.py": DATA_OPERATIONS | LIFETIME_OPERATIONS,  # which it hands to scripts
}
REGISTRATION = re.compile(r"register_(?!comm_hook$)\w*(hook|prehook)$")
HOOK_FILES = ("runtime/hooks.py", "runtime/gradient_hooks.py", "planner/dry_engine.py")
"""The last one on a copy, whose blocks it follows."""
STAGE_NAMES = frozenset({"stage", "zero_stage", "stage_number", "stage_name", "zero_optimization_stage"})
STAGE_FILES = ("stages", "config")
"""``config`` may compare a stage number once: whether it is one of those that exist."""

MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 7
MANY_PARAMETERS = frozenset({
    ("start.py", "initialize"), ("engine/engine.py", "__init__"), ("engine/arguments.py", "_check"),
    ("planner/memory_plan.py", "plan"), ("planner/choice.py", "choose"),
})  # fmt: skip
"""What users say at the start, each by its name, may be more."""
SLIVER_LINES = 80
SLIVERS: Mapping[str, str] = {
    "app/convert.py": "a command in a file of its own, as the others",
    "app/script.py": "a command in a file of its own, as the others",
    "app/dry_run.py": "a command in a file of its own, as the others",
    "app/flops.py": "a count of its own, which is tested beside torch's",
    "app/restarts.py": "which ranks may be started again: a policy, which is tested without processes",
    "app/evaluation.py": "a sum whose order is declared, which is tested without a loop",
    "app/global_mean.py": "the arithmetic of the printed loss, which is tested without a loop",
    "engine/settings_between_steps.py": "what may change between two windows, which is no part of a step",
    "core/comm_hooks.py": "what a hook of the user's may join, which is no part of a step",
    "core/shard_groups.py": "a rule of config and mesh, which is tested without an engine",
    "core/exchanging.py": "the order around an exchange of weights, for averages and for schedule-free classes",
    "checkpoint/model_facts.py": "what other libraries want to know of a model; nothing else of a save is about that",
    "compat/deepspeed/hosts.py": "facts of other libraries, each change with its reason",
    "planner/batches.py": "what is known of transformers' models; a plan of any other needs nothing of it",
    "planner/no_disk.py": "the interface of another package, without what that does",
    "comm/frames.py": "a format of messages, which is tested and read without groups",
    "engine/tracing.py": "one file of the events of all ranks; the engine's own file has enough",
    "core/offload_states.py": "freeing the device between two phases is no part of a step, nor of an engine's wiring",
    "engine/notices.py": "what is only said, which could be left out",
    "core/overflow.py": "sentences about gradients that are not finite; the engine's file has enough of its own",
    "offload/nvme/free_list.py": "an allocator of numbers, which is tested without a file",
    "optim/agreed_facts.py": "the wording of a disagreement between ranks, which is tested without ranks",
    "optim/foreign.py": "facts of other libraries, which change with their releases",
    "runtime/prefetch_order.py": "an order of numbers, which is tested and counted without units",
}
"""Modules below ``SLIVER_LINES`` that one file alone imports, each with the reason why it is no part of that file."""
NOT_OURS = frozenset({"data", "grad", "lr_scheduler"})
"""Attributes of torch's tensors and of Trainer, which some class of ours has, too."""

FORBIDDEN_TEXT = {
    "a machine's path": re.compile(r"(?<![\w.~])/(?:work|root|home)(?:/|\b)"),
    "an open end": re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


PAST_FRONT_DOORS: Mapping[str, str] = {
    "app/environment.py": "a bug report tells of the library of CPU kernels what nobody else may know",
}
"""Files that may look behind front doors, each with the reason."""


def attributes_of(source: str) -> set[str]:
    """The names of the attributes that the classes of a file have: set on ``self``, or in the class's body."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def assigned_from_outside(sources: Mapping[str, str]) -> list[str]:
    """Attributes of a class of ours that are assigned outside of its file. sources: path → text, of all files."""
    own = {path: attributes_of(source) for path, source in sources.items()}
    found = []
    for path, source in sources.items():
        others = set().union(*(names for other, names in own.items() if other != path)) - own[path]
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            if node.attr in others - NOT_OURS and ast.unparse(node.value) != "self":
                place = f"{path}:{node.lineno}: {ast.unparse(node)}"
                found.append(f"{place} is assigned outside of the file of its class: give that a method")
    return found


def slivers(sources: Mapping[str, str], modules: Mapping[str, str]) -> list[str]:
    """Short modules that one file alone imports: a part of that file, unless ``SLIVERS`` says why not.

    modules: dotted name → path. A front door that shows a module stands for everybody who comes through it.
    """
    importers: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if modules.get(name) in importers:
                    importers[modules[name]].add(path)
    found = []
    for path, by in importers.items():
        lines = len(sources[path].splitlines())
        if len(by) != 1 or lines >= SLIVER_LINES or path in SLIVERS:
            continue
        if not any(name.endswith("__init__.py") for name in (path, *by)):
            found.append(
                f"{path}: {lines} lines that {next(iter(by))} alone imports: part of it, or say why in SLIVERS"
            )
    return found


def entry_of(path: str) -> str:
    """The entry of IMPORT_ORDER that owns a file: ``"ddp/reducer.py"`` → ``"ddp"``, ``"errors.py"`` → ``"errors"``."""
    return path.split("/")[0].removesuffix(".py")


def module_of(path: str) -> str:
    """``"ddp/reducer.py"`` → ``"shardengine.ddp.reducer"``."""
    parts = [part for part in path.removesuffix(".py").split("/") if part != "__init__"]
    return ".".join([PACKAGE, *parts])


def own_imports(path: str, source: str, modules: frozenset[str]) -> Iterator[tuple[str, int, bool]]:
    """Yield (module of ours, line, inside a function) for every import of our package in a file.

    ``modules`` are the names of all modules of the package: ``from shardengine import errors`` is an import of the file
    ``errors.py``, ``from shardengine import initialize`` one of the package itself, and so is ``from shardengine.comm
    import mesh`` in another package, which goes through the front door.
    """
    tree = ast.parse(source)
    inside = {id(sub) for node in ast.walk(tree) if isinstance(node, Function) for sub in ast.walk(node)}
    package = module_of(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            near = start == PACKAGE or start.split(".")[:2] == module_of(path).split(".")[:2]
            names = sorted({full if (full := f"{start}.{a.name}") in modules and near else start for a in node.names})
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield name, getattr(node, "lineno", 0), id(node) in inside


def import_order(path: str, source: str, modules: frozenset[str]) -> list[str]:
    """Imports that go up or sideways in IMPORT_ORDER, files that it does not list, and imports inside functions."""
    own = entry_of(path)
    if own not in IMPORT_ORDER:
        return [f"{path}: not in IMPORT_ORDER; give the file its place there and in docs/architecture.md"]
    found = []
    for name, line, inside_function in own_imports(path, source, modules):
        parts = name.split(".")
        target = parts[1] if len(parts) > 1 else "__init__"
        same_package = target == own and "/" in path
        if target not in IMPORT_ORDER:
            found.append(f"{path}:{line}: imports {name}, which is not in IMPORT_ORDER")
        elif path in LAZY_IMPORTS_EXCEPTIONS and target == "checkpoint":
            continue
        elif not (same_package or len(parts) <= 2 or target in NO_FRONT_DOOR or path in PAST_FRONT_DOORS):
            found.append(f"{path}:{line}: imports {name} past the front door of {target}")
        elif not same_package and IMPORT_ORDER.index(target) >= IMPORT_ORDER.index(own):
            found.append(f"{path}:{line}: {own} imports {target}, which is not above it in IMPORT_ORDER")
        if inside_function and own not in LAZY_IMPORTS_ALLOWED and path not in LAZY_IMPORTS_EXCEPTIONS:
            found.append(f"{path}:{line}: imports {name} inside a function")
    return found


def import_cycles(sources: Mapping[str, str]) -> list[str]:
    """Cycles between the files of one package (the order between packages is IMPORT_ORDER's business)."""
    modules = frozenset(module_of(path) for path in sources)
    graph = {
        module_of(path): {
            name
            for name, _, _ in own_imports(path, text, modules)
            if name != module_of(path) and not (path in LAZY_IMPORTS_EXCEPTIONS and name == f"{PACKAGE}.checkpoint")
        }
        for path, text in sources.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> list[str]:
        if module in trail:
            return ["import cycle: " + " → ".join([*trail[trail.index(module) :], module])]
        if module in done:
            return []
        found = [text for name in sorted(graph.get(module, ())) for text in visit(name, (*trail, module))]
        done.add(module)
        return found

    return [text for module in sorted(graph) for text in visit(module, ())]


def names_past_doors(sources: Mapping[str, str]) -> list[str]:
    """What is imported from another package's front door that is not in the door's ``__all__``."""
    doors: dict[str, set[str]] = {}
    for path, text in sources.items():
        for node in ast.parse(text).body if path.endswith("/__init__.py") else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                doors[module_of(path)] = set(ast.literal_eval(node.value))
    found = []
    for path, text in sources.items():
        for statement in ast.walk(ast.parse(text)) if path not in PAST_FRONT_DOORS else ():
            if not isinstance(statement, ast.ImportFrom) or statement.module not in doors:
                continue
            if statement.module.split(".")[:2] != module_of(path).split(".")[:2]:
                wrong = sorted({alias.name for alias in statement.names} - doors[statement.module])
                found += [f"{path}:{statement.lineno}: {name} is not in {statement.module}.__all__" for name in wrong]
    return found


def _dotted(node: ast.expr) -> str:
    """``torch.distributed`` for that attribute chain, an empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _distributed_uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (operation, line) for each name taken from torch.distributed; ``getattr`` on it counts as all_reduce."""
    aliases = {"torch.distributed"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from ((alias.name, node.lineno) for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = _dotted(node.value)
            if any(base == alias or base.startswith(alias + ".") for alias in aliases):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and _dotted(node.func) == "getattr" and _dotted(node.args[0]) in aliases:
            yield "all_reduce", node.lineno


def distributed_operations(path: str, source: str) -> list[str]:
    """Operations of torch.distributed used in a file that has no right to them (see ALLOWED_OPERATIONS)."""
    allowed = ALLOWED_OPERATIONS.get(path) or ALLOWED_OPERATIONS.get(entry_of(path), frozenset())
    watched = DATA_OPERATIONS | GROUP_OPERATIONS | LIFETIME_OPERATIONS
    uses = sorted(set(_distributed_uses(ast.parse(source))), key=lambda use: (use[1], use[0]))
    return [
        f"{path}:{line}: torch.distributed.{name} may not be used in this file"
        for name, line in uses
        if name in watched and name not in allowed
    ]


def hook_registrations(path: str, source: str) -> list[str]:
    """Hook registrations outside runtime/hooks.py. An object of ours on itself is fine: it is no user's module."""
    if path in HOOK_FILES:
        return []
    return [
        f"{path}:{node.lineno}: {node.attr} belongs in runtime/hooks.py"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and REGISTRATION.match(node.attr) and _dotted(node.value) != "self"
    ]


def _names_a_stage(node: ast.expr) -> bool:
    """Whether an expression is a stage, its number or its name: ``stage``, ``config.stage``, ``stage.name``."""
    if isinstance(node, ast.Call):
        return _names_a_stage(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr in STAGE_NAMES or (node.attr in {"name", "number"} and _names_a_stage(node.value))
    return isinstance(node, ast.Name) and node.id in STAGE_NAMES


def stage_comparisons(path: str, source: str) -> list[str]:
    """Decisions on which stage it is (comparison, truth, match, literal table) outside stages/; ``is None`` is fine."""
    if entry_of(path) in STAGE_FILES:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        operands: list[ast.expr] = []
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            operands = [node.test]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operands = [node.operand]
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict | ast.Tuple | ast.List):
            operands = [node.slice]
        if any(_names_a_stage(operand) for operand in operands):
            found.append(f"{path}:{node.lineno}: a decision on the stage; ask one of its letters instead")
    return found


def parameter_count(node: Function) -> int:
    """Named parameters, keyword-only ones included, without self and cls, ``*args`` and ``**kwargs``."""
    arguments = node.args
    named = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return len([name for index, name in enumerate(named) if not (index == 0 and name in {"self", "cls"})])


def is_kernel(node: Function) -> bool:
    """Whether a function is decorated with ``triton.jit``. Its parameters are not counted: a kernel takes nothing
    but pointers, numbers and what it is compiled for, which cannot be gathered in a record."""
    calls = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return any(_dotted(call) == "triton.jit" for call in calls)


def budgets(path: str, source: str) -> list[str]:
    """Functions and parameter lists that are longer than agreed. A file may be as long as its subject."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
            many = (path, node.name) in MANY_PARAMETERS
            if (count := parameter_count(node)) > MAX_PARAMETERS and not is_kernel(node) and not many:
                found.append(f"{path}:{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}")
    return found


def documentation(path: str, source: str) -> list[str]:
    """Modules and public names without a docstring, public functions without a return annotation."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [f"{path}: no module docstring"]

    def check(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            name = prefix + node.name
            if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            if not ast.get_docstring(node):
                found.append(f"{path}:{node.lineno}: {name} has no docstring")
            if isinstance(node, ast.ClassDef):
                check(node.body, name + ".")
            elif node.returns is None:
                found.append(f"{path}:{node.lineno}: {name} has no return annotation")

    check(tree.body, "")
    return found


def forbidden_text(path: str, text: str) -> list[str]:
    """Paths of one machine and open ends in a tracked text."""
    return [
        f"{path}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if pattern.search(line)
    ]


def foreign_private_names(sources: Mapping[str, str]) -> set[str]:
    """Names that begin with an underscore, are read from an object or imported, and are made nowhere in ``sources``."""
    read, made = set[str](), set[str]()
    for node in (node for source in sources.values() for node in ast.walk(ast.parse(source))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute):
            (made if isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            private = any(part.startswith("_") for part in (node.module or "").split("."))
            read |= {alias.name for alias in node.names if private or alias.name.startswith("_")}
            made |= {alias.name for alias in node.names if (node.module or "").startswith(PACKAGE)}
    return {name for name in read - made if not name.startswith("__")}


def package_sources(root: Path) -> dict[str, str]:
    """Path under the package (``"ddp/reducer.py"``) to source text, for every Python file of the package."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return {file.relative_to(root / PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in files}
