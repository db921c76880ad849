"""What every test session has: rank pools, one per world size; the process that forks lives; the tiers of tests."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from shardengine import errors
from tests.support import tiers
from tests.support.forks import Forks
from tests.support.ranks import RankPool

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """``pools(n)``: n rank processes, started when first asked for."""
    started: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        return started.setdefault(ranks, RankPool(ranks))

    yield pool
    for running in started.values():
        running.stop()


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    """Messages have our names again after a test that has used another surface (``errors.call_by``), and are logged
    again after one that has run a command here."""
    log = logging.getLogger("shardengine")
    level = log.level
    yield
    errors._names.clear()
    log.setLevel(level)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Started when first asked for."""
    forks = Forks()
    yield forks
    forks.end()


def pytest_collection_finish() -> None:
    """A collection of garbage looks at what tests made, not at every import and test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What libraries check at the end of a process is as without that."""
    gc.unfreeze()


# Tiers (tests/support/tiers.py)


CASES = "cases"
"""The property of a test that says how many cases its function has, also those that the chosen tier leaves out."""


class Durations:
    """Adds up what each case takes, and writes the record when all have run. keep: what stays of the record."""

    def __init__(self, keep: tiers.Record | None) -> None:
        self.keep = keep
        self.seconds: dict[str, float] = defaultdict(float)
        self.cases: dict[str, int] = {}
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, the test, the end."""
        self.seconds[report.nodeid] += report.duration
        self.cases[tiers.function_of(report.nodeid)] = dict(report.user_properties)[CASES]  # type: ignore[assignment]
        if report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The process that hears of all tests writes, unless the run was broken off. What was skipped has no cost."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            ran = {nodeid: each for nodeid, each in self.seconds.items() if nodeid not in self.skipped}
            tiers.write(ran, self.cases, keep=self.keep)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--record-durations``."""
    text = f"write what tests took to {tiers.RECORD.name}, on an idle machine: make test ALL=1, EVERY=1, or whole files"
    parser.addoption("--record-durations", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist the reports of all workers reach the process that started them."""
    if not config.getoption("--record-durations"):
        return
    whole = config.option.markexpr in ("", "thorough") and not config.option.keyword
    if not whole or any("::" in each for each in config.args):
        raise pytest.UsageError(
            "--record-durations: expected a run of every test function (make test ALL=1 RECORD=1), or whole files "
            "(make test ARGS='tests/engine --record-durations')"
        )
    if "PYTEST_XDIST_WORKER" not in os.environ:
        everything = config.args_source is not pytest.Config.ArgsSource.ARGS
        config.pluginmanager.register(Durations(None if everything else tiers.read()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark what is quick and thorough, for ``-m``; then, of what was chosen, long files first."""
    record = tiers.read()
    cases = Counter(tiers.function_of(item.nodeid) for item in items)
    for item in items:
        item.user_properties.append((CASES, cases[tiers.function_of(item.nodeid)]))
    for item in tiers.thorough(items, record):
        item.add_marker("thorough")
    for item in tiers.quick(items, record):
        item.add_marker("quick")
    yield
    tiers.longest_files_first(items, record)
