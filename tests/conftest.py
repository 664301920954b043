"""What all tests share: threads, examples, the order of files, and what every test cost."""

import gc
import json
import os
import resource

# One thread a process, as in a run: workers of pytest share the cores, and sums do not depend on how many there are.
os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Property tests try the same examples at every run; HYPOTHESIS_PROFILE=explore tries others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_FIRST = ("integration", "conformance", "hosts", "cloud", "chaos")  # folders of processes, which take longest
_SHARING = (
    "tests/cloud",
    "tests/conformance",
    "tests/hosts",
    "tests/s3",
    "tests/integration/control_plane",
)  # their files share what they start
# Of these folders, but they share nothing, or take as long as all others.
_APART = tuple(f"tests/cloud/test_{name}.py" for name in ("flow", "leased", "emulated_cloud", "control", "terraform"))
_TOGETHER = (*_SHARING, "tests/unit/comparison", "tests/unit/flows")  # or what they import and compose


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    config.pluginmanager.register(CpuSeconds())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: item.path.relative_to(item.config.rootpath).parts[1] not in _FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Scheduling(config, log)


class _Scheduling(LoadScopeScheduling):
    """A worker takes whole files, or a whole folder, so that what its tests share is started once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in _APART:
            return file
        if (folder := str(Path(file).parent)) in _TOGETHER:
            return f"{folder} of vllm" if "[vllm" in nodeid else folder
        return file


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not go through it, while it is imported or later."""
    gc.collect()
    gc.freeze()
    gc.enable()


BUDGET_S = 20.0  # of a test without the marker `cpu_seconds`; machines differ by 2 to 3 times
_LISTED = 15
_FILE = "AREAL_CPU_SECONDS"  # names a file for the seconds of all tests, as JSON


@dataclass
class _Spent:
    cpu_s: float = 0.0
    wall_s: float = 0.0
    budget_s: float = BUDGET_S


class CpuSeconds:
    """Measures the CPU seconds of each test: of its own process and of the processes that it started. With xdist its
    workers measure, and the process that reports adds up.

    Processes count where they end: those of a shared fixture where that is torn down."""

    def __init__(self) -> None:
        self._counted_s = _used_s()
        self._tests: defaultdict[str, _Spent] = defaultdict(_Spent)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self._counted_s = _used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = yield
        before, self._counted_s = self._counted_s, _used_s()
        marker = item.get_closest_marker("cpu_seconds")
        report.cpu_s = self._counted_s - before  # attributes of a report travel to the process that reports
        report.budget_s = marker.args[0] if marker else BUDGET_S
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self._tests[report.nodeid]
        spent.cpu_s += report.cpu_s
        spent.wall_s += report.duration
        spent.budget_s = report.budget_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the most expensive tests and those beyond their budget. None fails: machines differ."""
        ranked = sorted(self._tests.items(), key=lambda test: -test[1].cpu_s)
        if not ranked:
            return
        if (file := os.environ.get(_FILE)) and not hasattr(terminalreporter.config, "workerinput"):
            Path(file).write_text(json.dumps({name: asdict(spent) for name, spent in ranked}, indent=1))
        in_all = sum(spent.cpu_s for _, spent in ranked)
        terminalreporter.section(f"most expensive of {len(ranked)} tests, {in_all:.0f} CPU seconds in all")
        for name, spent in ranked[:_LISTED]:
            terminalreporter.line(f"{spent.cpu_s:6.1f} CPU s {spent.wall_s:6.1f} s  {name}")
        for name, spent in ranked:
            if spent.cpu_s > spent.budget_s:
                terminalreporter.line(f"more than its {spent.budget_s:g} CPU seconds: {name}", yellow=True)


def _used_s() -> float:
    """By this process and by those of its descendants that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
