"""What a benchmark ran on: its last line carries it, as speeds are those of one revision and one machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def last_line(result: Mapping[str, Any]) -> str:
    """What was measured, and on what, as JSON."""
    return json.dumps({**result, "machine": machine()})


def machine() -> dict[str, Any]:
    """Revision of these sources ("+" where they were changed since), processor, cores that this process may use, and
    GFLOP/s of one large float32 product on one of them, now: what speeds can be related to."""
    return {
        "revision": _revision(),
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gflops_per_core": round(_product_flops_per_s() / 1e9, 1),
    }


def _revision() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        asked = [
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None  # no git, or sources without it
    return asked[0] + ("+" if asked[1] else "")


def _processor() -> str:
    """Its name, and the widest vectors that it has: clouds leave the model out of the name."""
    described = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)$", described, re.MULTILINE)
    flags = re.search(r"^flags\s*: (.*)$", described, re.MULTILINE)
    known = flags.group(1).split() if flags else []
    vectors = next((wide for wide in ("avx512f", "avx2") if wide in known), "")
    return " ".join(filter(None, (name.group(1) if name else "", vectors)))


def _product_flops_per_s() -> float:
    import torch

    from areal_core.training.hardware import peak_flops_per_s

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        measured = peak_flops_per_s(torch.device("cpu"), torch.float32)
    finally:
        torch.set_num_threads(threads)
    assert measured is not None  # a core is measured, not looked up
    return measured
