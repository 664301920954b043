"""What all tests share: threads, examples, and the order of files."""

import gc
import os

# One thread a process, as in a run: workers of pytest share the cores, and sums do not depend on how many there are.
os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from xdist.scheduler import LoadScopeScheduling

# Property tests try the same examples at every run; HYPOTHESIS_PROFILE=explore tries others, and `mutants` looks for no
# simpler example than the first that fails.
# No example has a time limit: machines differ.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.register_profile("mutants", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_FIRST = ("integration", "conformance", "hosts", "cloud", "chaos")  # folders of processes, which take longest
# Their files share what they start, or what they import and compose.
_TOGETHER = (
    *("tests/cloud", "tests/conformance", "tests/s3", "tests/integration/control_plane"),
    *("tests/unit/comparison", "tests/unit/flows"),
)
# Of these folders, but they share nothing, or take as long as all others.
_APART = tuple(f"tests/cloud/test_{name}.py" for name in ("flow", "leased", "control", "terraform"))


def pytest_configure() -> None:
    gc.disable()


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
        folder = str(Path(file).parent)
        if file in _APART or folder not in _TOGETHER:
            return file
        return f"{folder} of vllm" if "[vllm" in nodeid else folder


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not go through it, while it is imported or later."""
    gc.collect()
    gc.freeze()
    gc.enable()
