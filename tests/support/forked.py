"""Processes that need torch, each forked from one that has imported it: the import takes two CPU seconds every time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

_IMPORTED = ["tests.support.ranks", "tests.support.training"]  # with torch; nothing there starts a thread


def start(
    target: Callable[..., object], *arguments: object, output: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """A process that calls `target` with `arguments`; what it prints, errors included, goes to `output`. Its
    environment is that of the first such process, with `environment` over it."""
    process = _server().Process(target=_run, args=(target, arguments, output, dict(environment or {})))
    process.start()
    return process


def _run(
    target: Callable[..., object], arguments: tuple[object, ...], output: Path, environment: dict[str, str]
) -> None:
    with output.open("ab", buffering=0) as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    os.environ.update(environment)
    target(*arguments)


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
