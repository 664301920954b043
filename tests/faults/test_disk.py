"""The disk that loses power, under programs of a few calls: what was synced is always there, what was not may be gone,
torn or there."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.faults.disk import Clock, Disk, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

_SEEDS = range(40)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "root").mkdir()
    return Disk(tmp_path / "root", tmp_path / "logs")


def run(disk: Disk, program: str) -> int:
    """Run a program whose working directory is the disk; returns the number of records so far."""
    command = [sys.executable, "-c", f"import os, shutil, sqlite3, subprocess, sys\n{program}"]
    subprocess.run(command, cwd=disk.root, env={**os.environ, **disk.environment()}, check=True)
    return disk.now()


def images(disk: Disk, cut: int, *, strict: bool = False) -> list[dict[str, bytes]]:
    """What the disk may hold after `cut`, by seed: files by their names."""
    found: list[dict[str, bytes]] = []
    for seed in _SEEDS:
        target = disk.root.parent / f"image-{cut}-{seed}-{strict}"
        disk.image(target, cut, seed, strict=strict)
        found.append({str(file.relative_to(target)): file.read_bytes() for file in target.rglob("*") if file.is_file()})
    return found


_WRITE = "f = os.open('a', os.O_CREAT | os.O_WRONLY); os.write(f, b'x' * 20_000)\n"
_SYNC_FOLDER = "d = os.open('.', os.O_RDONLY); os.fsync(d)\n"


def test_what_was_not_synced_may_be_there_torn_empty_or_gone(disk: Disk) -> None:
    seen = images(disk, run(disk, _WRITE))
    assert {len(image["a"]) for image in seen if "a" in image} > {0, 20_000}
    assert any("a" not in image for image in seen)
    torn = [image["a"] for image in seen if 0 < image.get("a", b"").count(b"x") < 20_000]
    assert any(b"\0" in data for data in torn)  # a block in the middle that is missing


@pytest.mark.parametrize(
    "sync", ["os.fsync(f)", "os.fdatasync(f)", "os.sync()"], ids=["fsync", "fdatasync", "sync of everything"]
)
def test_what_was_synced_is_there(disk: Disk, sync: str) -> None:
    seen = images(disk, run(disk, f"{_WRITE}{sync}\n{_SYNC_FOLDER}"), strict=True)
    assert all(image == {"a": b"x" * 20_000} for image in seen)


def test_a_file_that_is_opened_for_synced_writes(disk: Disk) -> None:
    cut = run(disk, f"f = os.open('a', os.O_CREAT | os.O_WRONLY | os.O_DSYNC); os.write(f, b'abc')\n{_SYNC_FOLDER}")
    assert all(image == {"a": b"abc"} for image in images(disk, cut))


def test_what_is_written_after_a_sync_may_be_gone(disk: Disk) -> None:
    seen = images(disk, run(disk, f"{_WRITE}os.fsync(f); {_SYNC_FOLDER}os.pwrite(f, b'yyy', 0)"))
    assert {image["a"][:4] for image in seen} == {b"xxxx", b"yyyx"}


def test_a_sync_does_not_reach_what_another_process_writes_after_it(disk: Disk) -> None:
    child = "subprocess.run([sys.executable, '-c', \"open('a', 'r+b').write(b'later')\"])"
    seen = images(disk, run(disk, f"{_WRITE}os.fsync(f); {_SYNC_FOLDER}{child}"))
    assert {image["a"][:5] for image in seen} == {b"xxxxx", b"later"}


@pytest.mark.parametrize("synced", [False, True])
def test_a_rename_is_kept_once_its_folder_is_synced(disk: Disk, synced: bool) -> None:
    (disk.root / "a").write_bytes(b"old")
    disk = Disk(disk.root, disk.root.parent / "again")
    program = "f = open('b', 'wb'); f.write(b'new'); f.flush(); os.fsync(f.fileno()); os.replace('b', 'a')\n"
    seen = {image["a"] for image in images(disk, run(disk, program + (_SYNC_FOLDER if synced else "")))}
    assert seen == ({b"new"} if synced else {b"old", b"new"})


@pytest.mark.parametrize("strict", [False, True])
def test_a_folder_that_no_sync_of_the_one_above_covers(disk: Disk, strict: bool) -> None:
    program = "os.makedirs('a/b'); f = os.open('a/b/c', os.O_CREAT | os.O_WRONLY); os.write(f, b'1'); os.fsync(f)\n"
    cut = run(disk, f"{program}d = os.open('a/b', os.O_RDONLY); os.fsync(d)")
    lost = [image for image in images(disk, cut, strict=strict) if image != {"a/b/c": b"1"}]
    assert bool(lost) == strict


def test_a_removal_that_was_not_synced_may_be_undone(disk: Disk) -> None:
    (disk.root / "folder").mkdir()
    (disk.root / "folder" / "a").write_bytes(b"1")
    disk = Disk(disk.root, disk.root.parent / "again")
    seen = images(disk, run(disk, "shutil.rmtree('folder')"))
    assert {"folder/a" in image for image in seen} == {False, True}
    cut = run(disk, _SYNC_FOLDER)
    assert not any(images(disk, cut))


def test_power_may_be_lost_before_the_end(disk: Disk) -> None:
    first = run(disk, f"{_WRITE}os.fsync(f); {_SYNC_FOLDER}")
    run(disk, f"os.unlink('a'); {_SYNC_FOLDER}")
    assert all(image == {"a": b"x" * 20_000} for image in images(disk, first))


def test_files_that_the_kernel_copies(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"0123456789" * 1000)
    program = f"shutil.copyfile({str(tmp_path / 'source')!r}, 'a'); f = os.open('a', os.O_RDONLY); os.fsync(f)\n"
    cut = run(disk, program + _SYNC_FOLDER)
    assert all(image == {"a": b"0123456789" * 1000} for image in images(disk, cut))


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
def test_a_database_is_whole_and_loses_nothing_that_it_has_synced(disk: Disk, synchronous: str) -> None:
    """SQLite goes through the C library, and its promises hold on this disk: with FULL every transaction is kept, with
    NORMAL a prefix of them."""
    program = f"""db = sqlite3.connect('a.sqlite', isolation_level=None)
db.execute('PRAGMA journal_mode = WAL'); db.execute('PRAGMA synchronous = FULL')
db.execute('CREATE TABLE t (n)')
db.execute('PRAGMA synchronous = {synchronous}')
for n in range(20): db.execute('INSERT INTO t VALUES (?)', (n,))
os._exit(0)
"""
    cut = run(disk, program)
    counts: set[int] = set()
    for seed in _SEEDS:
        target = disk.root.parent / f"image-{seed}"
        disk.image(target, cut, seed)
        with closing(sqlite3.connect(target / "a.sqlite")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = [row[0] for row in database.execute("SELECT n FROM t ORDER BY n")]
        assert rows == [*range(len(rows))]
        counts.add(len(rows))
    assert counts == {20} if synchronous == "FULL" else min(counts) < 20


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    clock.jump(-86_400.0)
    told = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time(), time.clock_gettime(time.CLOCK_MONOTONIC))"],
        env={**os.environ, **clock.environment()},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wrong = subprocess.run(["date", "+%s"], check=True, capture_output=True, text=True).stdout
    assert 86_000 < float(wrong) - float(told[0]) < 87_000
