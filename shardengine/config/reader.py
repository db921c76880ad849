"""From a JSON tree to flat, checked values. Owns: parsing the file, the walk over the tree, the wording of problems.

A `Reader` takes one tree through these passes and collects everything that is wrong instead of stopping at the first:

    scan     drop remarks; report values that no key can have: duplicates, NaN, values that are not JSON
    rename   old names move to the current ones; messages keep the name that was written
    visit    every key is looked up in `schema.KEYS`, parsed by its kind and treated by its status
    named    optimizer and scheduler: the type and its parameters

[Note: "auto"] "auto" is replaced by the value that the caller passes for it; otherwise by the default, with a notice.
It is a problem if only the caller can know the value (`foreign.ONLY_CALLER`). Batch sizes follow from each other.

[Note: One mistake, one problem] The value of a key is unknown if it could not be read, or if an unknown key most likely
means it. No other check looks at such a key (`Reader.usable`): its finding would be a consequence.

It must not know the objects that `config/load.py` builds from the result.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from shardengine.config.foreign import (
    ALIAS_NEEDS,
    ALIAS_VALUES,
    ALIASES,
    FILLED_FROM,
    ONLY_CALLER,
    OPTIMIZER_FIXED,
    OPTIMIZER_NO_EFFECT,
    OPTIMIZERS_REFUSED,
    is_off,
)
from shardengine.config.kinds import (
    COUNT_OR_AUTO,
    EVERY,
    PART,
    REMARKS,
    SIZE_OR_AUTO,
    UNITS,
    check_table,
    describe,
    nearest,
    plain,
)
from shardengine.config.schema import KEYS, OPTIMIZERS, SECTIONS, TRIPLE, Key, Status, join
from shardengine.errors import ConfigError

Source = Literal["file", "default", "auto", "derived"]
"""The origin of a value. "auto": the file says "auto" and the caller gave the value."""

_AUTOMATIC = (UNITS, PART, COUNT_OR_AUTO, SIZE_OR_AUTO)
"""Kinds that have "auto" among their values."""

NO_EFFECT_BECAUSE, READ_AS = " has no effect, because ", " is read as "
"""The words in a notice between the key and the reason, and between its two names."""

_ABSENT: Any = object()
_TWICE = "the key is written more than once; keep one"
_OPAQUE = (Status.REFUSED, Status.NO_EFFECT)

_NEVER_FALSE = frozenset({"zero_optimization", "optimizer", "scheduler"})
"""Sections that ``false`` does not switch off; of these only the last two may be null."""


def is_comment(name: str) -> bool:
    """Return whether ``name`` is no key but a remark."""
    return name.startswith(REMARKS)


class JsonObject(dict[str, Any]):
    """A JSON object that remembers which of its keys were written more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.duplicates = sorted({name for name in names if names.count(name) > 1 and not is_comment(name)})


class ConfigTree(dict[str, Any]):
    """A config as a mapping that knows its origin: errors begin with ``where``."""

    def __init__(self, tree: Mapping[str, Any], where: str) -> None:
        super().__init__(tree)
        self.where = where


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file into objects that know their duplicate keys. Raises ConfigError with the path, line and column."""
    try:
        tree = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=JsonObject)
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror or error}", str(path)) from error
    except json.JSONDecodeError as error:
        place = f"at line {error.lineno}, column {error.colno}"
        hint = '; JSON has no comments and no comma before a closing bracket: write remarks as keys that begin with "_"'
        raise ConfigError(f"not JSON: {error.msg} {place}{hint}", str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON that can be read: {error}", str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a JSON object at the top level, got {describe(tree)}", str(path))
    return tree


def read_tree(path: Path) -> dict[str, Any]:
    """Parse a file, for callers who change its content before it is loaded.

    Raises ConfigError as ``read_json`` does, and for keys that are written more than once, which plain objects lose.
    """
    tree = read_json(path)
    if problems := [f"{name}: {_TWICE}" for name in _written_twice(tree, "")]:
        raise ConfigError(problems, str(path))
    result: dict[str, Any] = plain(tree)
    return result


def _written_twice(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, JsonObject):
        yield from (join(path, name) for name in node.duplicates)
    if isinstance(node, dict):
        for name, inside in node.items():
            yield from _written_twice(inside, join(path, name))
    for index, inside in enumerate(node if isinstance(node, list) else ()):
        yield from _written_twice(inside, f"{path}[{index}]")


class Reader:
    """One reading of one file: collects values, sources, problems and notices. Lives for one `load_config`.

    ``automatic``: the keys that are "auto" in the file.
    """

    def __init__(self, auto: Mapping[str, Any] | None = None) -> None:
        """auto: dotted name → the value to use if the file says "auto"."""
        self._auto = dict(auto or {})
        self.automatic: set[str] = set()
        self.problems: list[str] = []
        self.notices: list[str] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[str, Source] = {}
        self._failed: set[str] = set()
        self.written: dict[str, str] = {}
        self.present: frozenset[str] = frozenset()

    def read(self, tree: dict[str, Any]) -> None:
        """Check ``tree`` (changed in place) and fill ``values`` and ``sources`` with its content."""
        for name in self._auto:
            if name not in KEYS and name.rpartition(".")[0] not in ("optimizer.params", "scheduler.params"):
                params = {param: f"optimizer.params.{param}" for table in OPTIMIZERS.values() for param in table}
                section, _, leaf = name.rpartition(".")
                close = params.get(name) or (
                    _nearest_key(section, leaf) if section in SECTIONS else _nearest_key("", name)
                )
                text = f'auto names the unknown key "{name}"; the nearest valid key is "{close}"'
                self.problems.append(text)
                self._failed.add(close)
        self._scan(tree, "")
        self._nest(tree)
        self._rename(tree)
        self.present = frozenset(name for name, value in tree.items() if isinstance(value, dict))
        self._visit(tree, "")
        for section, found in (
            ("optimizer", self._optimizer()),
            ("scheduler", self._named("scheduler", "WarmupCosineLR")),
        ):
            if found is not None:
                self.values[f"{section}.type"], self.values[f"{section}.params"] = found

    def problem(self, name: str, text: str) -> None:
        """Note that the key ``name`` (dotted) cannot be used. text: the expected and the given value."""
        self._failed.add(_current(name))
        self.problems.append(f"{self._place(name)}: {text}")

    def usable(self, *names: str) -> bool:
        """Return whether each key has the value of the file, or its default because the file does not have it.

        For other keys a problem is noted already ([Note: One mistake, one problem]).
        """
        return not any(name == failed or name.startswith(f"{failed}.") for name in names for failed in self._failed)

    def _unknown(self, name: str, close: str, text: str) -> None:
        """Note that the key ``name`` is unknown; ``close`` is the key that it most likely means."""
        self.problem(name, text)
        self._failed.add(_current(close))

    def _place(self, name: str) -> str:
        for new, old in self.written.items():
            if name == new or name.startswith(new + "."):
                return old + name[len(new) :]
        return name or "the top level"

    def _scan(self, node: Any, path: str, *, opaque: bool = False) -> bool:
        """Drop remarks, report and drop values that no key can have, and return whether ``node`` can be kept.

        Such values are duplicates, numbers that are not finite, and foreign types. opaque: inside of a key that has no
        effect or is rejected, whatever it holds.
        """
        known = KEYS.get(ALIASES.get(path, path))
        opaque |= known is not None and known.status in _OPAQUE
        if isinstance(node, dict):
            for name in node.duplicates if isinstance(node, JsonObject) else ():
                self.problem(join(path, name), _TWICE)
            for name in list(node):
                if not isinstance(name, str):
                    self.problem(path, f"expected keys that are strings, got {describe(name)}")
                    del node[name]
                elif is_comment(name) or not self._scan(node[name], join(path, name), opaque=opaque):
                    del node[name]
            return True
        if isinstance(node, list):
            usable = [self._scan(item, f"{path}[{index}]", opaque=opaque) for index, item in enumerate(node)]
            if not all(usable):
                self._failed.add(_current(path))
            return all(usable)
        if opaque or (node == math.inf and known is not None and known.kind is EVERY):
            return True
        if isinstance(node, float) and not math.isfinite(node):
            self.problem(path, f"expected a finite number, got {node!r}")
        elif node is not None and not isinstance(node, (str, int, float)):
            self.problem(path, f"expected a JSON value, got {describe(node)}")
        else:
            return True
        return False

    def _nest(self, tree: dict[str, Any]) -> None:
        """Move values with dotted names on the top level into their sections, in place.

        A value that is already there wins.
        """
        for name in [name for name in tree if name.rpartition(".")[0] in SECTIONS]:
            value, holder = tree.pop(name), tree
            *sections, leaf = name.split(".")
            for section in sections:
                inside = holder.setdefault(section, {})
                holder = inside if isinstance(inside, dict) else {}
            if leaf in holder:
                self.notices.append(
                    f'"{name}" on the top level has no effect, because {name} is also written in its place'
                )
            else:
                holder[leaf] = value

    def _automatic(self, name: str, default: str) -> Any:
        """Return the caller's value for ``name``, which is "auto" in the file ([Note: "auto"]).

        Otherwise returns _ABSENT, with a notice that the ``default`` is used, or with a problem.
        """
        self.automatic.add(name)
        argument = FILLED_FROM.get(name)
        trainer = f", which Hugging Face's Trainer fills from its argument {argument}" if argument else ""
        if name in self._auto:
            return self._auto[name]
        if name in TRIPLE:
            self.notices.append(f'{self._place(name)} is "auto" and is worked out from the other batch sizes')
        elif name in ONLY_CALLER:
            if self.usable(name):
                plan = ", which a plan decides at initialize and in train" if name == "zero_optimization.stage" else ""
                who = trainer or plan
                text = f'"auto"{who}{who and ","} cannot be known here; write a value, or give one: {_give(name)}'
                self.problem(name, text)
        else:
            instead = f"; for another one: {_give(name)}" if argument else ""
            self.notices.append(f'{self._place(name)} is "auto"{trainer}: here {default} counts{instead}')
        return _ABSENT

    def _rename(self, tree: dict[str, Any]) -> None:
        """Move values from old names to the current ones, in place."""
        for old, new in ALIASES.items():
            section, _, leaf = old.rpartition(".")
            holder = tree.get(section) if section else tree
            if not isinstance(holder, dict) or leaf not in holder:
                continue
            written = holder.pop(leaf)
            if (switch := ALIAS_NEEDS.get(old)) is not None:
                enabled = holder.get(switch.rpartition(".")[2])
                if (self._auto.get(switch) if enabled == "auto" else enabled) is not True:
                    self.notices.append(f"{old}{NO_EFFECT_BECAUSE}{switch} is not true")
                    continue
            value = ALIAS_VALUES[old](written) if old in ALIAS_VALUES else written
            section, _, leaf = new.rpartition(".")
            if section and not tree.get(section):
                tree[section] = {}
            target = tree[section] if section else tree
            if not isinstance(target, dict):
                continue
            if leaf in target:
                self.problem(new, f"the key is written twice, also as {old}; keep one")
                continue
            target[leaf] = value
            self.written[new] = old
            if new in SECTIONS or KEYS[new].status is not Status.NO_EFFECT:
                changed = f": {json.dumps(value)}" if isinstance(written, bool) and value is not written else ""
                self.notices.append(f"{old}{READ_AS}{new}{changed}")

    def _visit(self, tree: Mapping[str, Any], section: str) -> None:
        for name, value in tree.items():
            dotted = join(section, name)
            if dotted in SECTIONS:
                self._section(dotted, value)
            elif dotted in KEYS:
                self._leaf(KEYS[dotted], value)
            else:
                names_type = section in ("optimizer", "scheduler") and isinstance(value, str) and "type" not in tree
                close = f"{section}.type" if names_type else _nearest_key(section, name)
                level = ", on the top level" if section and "." not in close else ""
                self._unknown(dotted, close, f'unknown key; the nearest valid key is "{close}"{level}')

    def _section(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            self._visit(value, name)
        elif value is None and name != "zero_optimization":
            return
        elif value is not False or name in _NEVER_FALSE:
            self.problem(name, f"expected an object, got {describe(value)}")

    def _leaf(self, key: Key, value: Any) -> None:
        section = key.name.rpartition(".")[0]
        if key.status is Status.NO_EFFECT:
            asked = not is_off(value) if isinstance(value, Mapping) or not section else True
            if asked:
                self.notices.append(f"{self._place(key.name)}{NO_EFFECT_BECAUSE}{key.note}")
            return
        if key.status is Status.REFUSED:
            if not is_off(value) and value not in key.default:
                self.problem(key.name, f"cannot be switched on, because {key.note}")
            return
        if key.status is not Status.ACTIVE and (value is None or value is False):
            return
        source: Source = "file"
        if value == "auto" and (key.kind not in _AUTOMATIC or key.name in self._auto):
            value, source = self._automatic(key.name, f"the default {json.dumps(plain(key.default))}"), "auto"
            if value is _ABSENT:
                return
        try:
            parsed = key.kind.parse(value)
        except ValueError as error:
            self.problem(key.name, str(error))
            return
        if key.status is Status.ACTIVE:
            if parsed is not None or key.default is None:  # else null stands for the default
                self.values[key.name], self.sources[key.name] = parsed, source
        elif parsed != key.default:
            self.later(key.name, json.dumps(key.default))

    def later(self, name: str, off: str) -> None:
        """Note that the feature of ``name`` does not exist yet. off: the value that switches it off."""
        self.problem(name, f"not available yet in this version; switch it off ({off}) or leave it out")

    def _named(self, section: str, example: str) -> tuple[str, dict[str, Any]] | None:
        """Take the type and the unchecked params of "optimizer" or "scheduler"; None if there is no usable one."""
        self.sources.pop(f"{section}.params", None)
        params: dict[str, Any] = self.values.pop(f"{section}.params", {})
        name: str | None = self.values.pop(f"{section}.type", None)
        if name is not None:
            self.sources.update({f"{section}.params.{param}": "file" for param in params})
            return name, params if section == "optimizer" else self._fill(section, params, {})
        if section in self.present and self.usable(f"{section}.type"):
            self.problem(f"{section}.type", f"the key is missing; expected a name such as {example}")
        return None

    def _fill(self, section: str, params: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``params`` with "auto" replaced. defaults: the known defaults of parameters."""
        filled = {}
        for param, value in params.items():
            dotted = f"{section}.params.{param}"
            if value == "auto":
                default = f"the default {json.dumps(defaults[param])}" if param in defaults else "the default"
                value = self._automatic(dotted, default)
                self.sources[dotted] = "auto"
            if value is _ABSENT:
                del self.sources[dotted]
            else:
                filled[param] = value
        return filled

    def _optimizer(self) -> tuple[str, dict[str, Any]] | None:
        """Take the optimizer as (normalised type, all its hyper-parameters); None if there is no usable one."""
        read = self._named("optimizer", "AdamW")
        if read is None:
            return None
        written, given = read
        known = {name.lower(): name for name in (*OPTIMIZERS, *OPTIMIZERS_REFUSED)}
        name = known.get(written.lower())
        if name is None:
            close = known[nearest(written, known)]
            text = (
                f'unknown optimizer "{written}"; the nearest known one is "{close}", available: {", ".join(OPTIMIZERS)}'
            )
            self.problem("optimizer.type", text)
        elif name in OPTIMIZERS_REFUSED:
            text = f"{name} is not elementwise and cannot be stepped on shards: {OPTIMIZERS_REFUSED[name]}"
            self.problem("optimizer.type", f"{text}; use one of {', '.join(OPTIMIZERS)}")
        else:
            return self._hyper_parameters(name, given)
        return None

    def _hyper_parameters(self, name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        table, place = OPTIMIZERS[name], "optimizer.params."
        adam = name in ("Adam", "AdamW")
        known = {param: default for param, (_, default) in table.items()} | ({"adam_w_mode": True} if adam else {})
        known |= {param: value for param, (value, owners, _) in OPTIMIZER_FIXED.items() if name in owners}
        unknown = {param: value for param, value in given.items() if param not in known}
        given = self._fill("optimizer", {p: value for p, value in given.items() if p in known}, known) | unknown
        if adam:
            name = self._decoupled(name, given)
        self.sources.update({place + param: "default" for param in table if param not in given})
        params = check_table(
            table,
            given,
            lambda param, text: self.problem(place + param, text),
            lambda param, value: self._not_in_table(name, param, value),
        )
        needed = (f"{place}momentum", f"{place}dampening")
        dampening = params.get("dampening", 0)
        if params.get("nesterov") and (params["momentum"] == 0 or dampening != 0) and self.usable(*needed):
            came = f"{params['momentum']:g} and {dampening:g}"
            self.problem(f"{place}nesterov", f"nesterov needs momentum > 0 and dampening 0, got {came}")
        return name, params

    def _not_in_table(self, name: str, param: str, value: Any) -> None:
        """Report a hyper-parameter that optimizer ``name`` lacks: no effect, one allowed value, or unknown."""
        dotted = f"optimizer.params.{param}"
        self.sources.pop(dotted, None)
        fixed, owners, why = OPTIMIZER_FIXED.get(param, (None, (), ""))
        if param in OPTIMIZER_NO_EFFECT:
            self.notices.append(f"{dotted}{NO_EFFECT_BECAUSE}{OPTIMIZER_NO_EFFECT[param]}")
        elif name not in owners:
            switch = ("adam_w_mode",) if name in ("Adam", "AdamW") else ()
            known = (*OPTIMIZERS[name], *OPTIMIZER_NO_EFFECT, *switch)
            close = f"optimizer.params.{'lr' if param == 'learning_rate' else nearest(param, known)}"
            self._unknown(dotted, close, f'unknown parameter of {name}; the nearest valid key is "{close}"')
        elif isinstance(value, bool) is not isinstance(fixed, bool) or value != fixed:
            text = f"expected {json.dumps(fixed)}, got {describe(value)}; nothing else is supported, because {why}"
            self.problem(dotted, text)

    def _decoupled(self, name: str, given: dict[str, Any]) -> str:
        mode = given.pop("adam_w_mode", True)
        self.sources.pop("optimizer.params.adam_w_mode", None)
        if not isinstance(mode, bool):
            self.problem("optimizer.params.adam_w_mode", f"expected true or false, got {describe(mode)}")
        elif name == "AdamW" and not mode:
            self.problem("optimizer.params.adam_w_mode", 'expected true for AdamW, got false; for L2 write type "Adam"')
        elif name == "Adam" and not mode:
            self.notices.append('optimizer "Adam" with "adam_w_mode": false is Adam, with weight decay as an L2 term')
        elif name == "Adam":
            self.notices.append('optimizer "Adam" is AdamW (decoupled weight decay) unless "adam_w_mode" is false')
            return "AdamW"
        return name


def _current(name: str) -> str:
    """Return ``name``, or its current name if it or its section has an old one."""
    for old, new in ALIASES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def _give(name: str) -> str:
    return f'load_config(file, auto={{"{name}": …}})'


def _nearest_key(section: str, name: str) -> str:
    """Return the most similar key of the section, or the key of the same name in another section."""
    places = [key.rpartition(".") for key in (*KEYS, *SECTIONS)]
    elsewhere = [join(holder, leaf) for holder, _, leaf in places if leaf == name]
    beside = [key for key in (*KEYS, *SECTIONS, *ALIASES) if key.rpartition(".")[0] == section]
    close = nearest(join(section, name), beside)
    alike = difflib.SequenceMatcher(None, name.lower(), close.rpartition(".")[2].lower()).ratio()
    return elsewhere[0] if elsewhere and alike < 0.8 else close
