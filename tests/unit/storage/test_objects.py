"""Where a store is, and what names are. What every kind of store does: tests/s3."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import areal_core
from areal_core.errors import StorageError
from areal_core.storage import durable
from areal_core.storage.folder import Folder
from areal_core.storage.objects import Storage
from areal_core.storage.patience import RetryPolicy
from tests.faults.disk import Disk, compiler
from tests.support.virtual import VirtualClock


@pytest.mark.parametrize("url", ["{}/a b/new", "file://{}/a b/new", "a b/new"])
def test_folder_is_made_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    store = Storage.open(url.format(tmp_path))
    assert store.url == str(tmp_path / "a b" / "new")
    assert list((tmp_path / "a b" / "new").iterdir()) == []
    for name in ("../x", "a/../../x"):
        with pytest.raises(StorageError, match="is outside the store"):
            store.put_bytes(name, b"x")
    for prefix in ("", "/"):
        with pytest.raises(StorageError, match="refuses to delete"):
            store.delete(prefix)


@pytest.mark.parametrize(
    "url", ["gs://bucket/x", "", "file://", "s3://", "http://host/x", "/proc/areal", "/dev/null/x"]
)
def test_unusable_location_names_the_field(url: str) -> None:
    said = f"can't write {url}" if url.startswith("/") else ""
    with pytest.raises(StorageError, match=rf"^storage\.url: {said}") as caught:
        Storage.open(url)
    assert "\n" not in str(caught.value)


_NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user or to mount a small disk")


def store_in(folder: Path, time: VirtualClock) -> Storage:
    return Storage(Folder(), str(folder), str(folder), RetryPolicy(1800.0, time.clock))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_disk_that_fails_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    replace, failures = durable.replace, iter(range(3))

    def fail(scratch: Path, path: Path) -> None:
        if next(failures, None) is not None:
            raise OSError(code, os.strerror(code))
        replace(scratch, path)

    monkeypatch.setattr(durable, "replace", fail)
    time = VirtualClock()
    store = store_in(tmp_path / "store", time)
    (tmp_path / "local").write_bytes(b"content")
    store.put_file(tmp_path / "local", "a/name")
    assert store.get_bytes("a/name") == b"content"
    assert [file.name for file in (tmp_path / "store" / "a").iterdir()] == ["name"]
    assert len(time.slept) == 3
    assert f"can't write {tmp_path}/store/a/name: {os.strerror(code)}; retrying" in caplog.text
    failures = iter(range(10**6))
    line = rf"^storage\.url: can't write {tmp_path}/store/x: {os.strerror(code)}; retried for 1800 s$"
    before = sum(time.slept)
    with pytest.raises(StorageError, match=line):
        store.put_bytes("x", b"1")
    assert sum(time.slept) - before == pytest.approx(1800.0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that everybody may reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@as_root
@pytest.mark.parametrize(
    ("ask", "action"),
    [
        (lambda store: store.sizes(), "list"),
        (lambda store: store.sizes("closed"), "list"),
        (lambda store: store.get_bytes("closed/name"), "read"),
        (lambda store: store.delete("closed"), "delete"),
    ],
)
def test_what_can_t_be_read_is_not_taken_for_absent(open_folder: Path, ask: Any, action: str) -> None:
    """A run that took its checkpoints for absent would begin anew."""
    (open_folder / "closed").mkdir()
    (open_folder / "closed" / "name").write_bytes(b"1")
    (open_folder / "closed").chmod(0)
    time = VirtualClock()
    with as_nobody(), pytest.raises(StorageError, match=rf"^storage\.url: can't {action} .*: Permission denied$"):
        ask(store_in(open_folder, time))
    assert time.slept == []


def test_a_listing_holds_what_is_there_while_others_write(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path))
    store.put_bytes("folder/kept", b"1")
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            store.put_bytes("folder/changing", b"2")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all("folder/kept" in store.sizes() for _ in range(300))
    finally:
        done.set()
        writer.join()


def test_what_killed_writers_have_left_is_removed_after_a_day(tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path))
    store.put_bytes("a/name", b"1")
    left = {age: tmp_path / "a" / f"name.{age}.part" for age in ("young", "stale")}
    for file in left.values():
        file.write_bytes(b"half")
    now = left["stale"].stat().st_mtime
    os.utime(left["stale"], (now, now - 25 * 3600))
    os.utime(tmp_path / "a" / "name", (now, now - 25 * 3600))
    assert list(store.list()) == ["a/name"]
    Storage.open(str(tmp_path))
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["name", "name.young.part"]


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_loss_of_power_brings_back_no_manifest_of_a_checkpoint_that_is_half_deleted(tmp_path: Path) -> None:
    program = """from pathlib import Path
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
store = Storage.open("store")
for step in (1, 2):
    Path("state").write_text("state")
    checkpoint.save(store, step, {name: Path("state") for name in ("a", "b", "c")}, {})
checkpoint.prune(store, 1)
"""
    (tmp_path / "root").mkdir()
    disk = Disk(tmp_path / "root", tmp_path / "logs")
    environment = {**os.environ, **disk.environment(), "PYTHONPATH": str(Path(areal_core.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], cwd=disk.root, env=environment, check=True)
    begun = max(record.sequence for record in disk.records() if record.data == b"manifest.json")  # its deletion
    half = 0
    for cut in range(begun, disk.now() + 1):
        for seed in range(40):
            image = tmp_path / f"image-{cut}-{seed}"
            disk.image(image, cut, seed)
            left = {file.name for file in (image / "store").glob("checkpoints/step-000001.0/*")}
            assert "manifest.json" not in left or {"a", "b", "c"} <= left
            half += 0 < len(left) < 4
    assert half


_LIMIT_S = 1800.0


class Failing:
    """Work that raises these errors, one a try, and then gives its result."""

    def __init__(self, *errors: OSError) -> None:
        self._errors: Iterator[OSError] = iter(errors)
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        for error in self._errors:
            raise error
        return "done"


def full() -> OSError:
    return OSError(28, "No space left on device")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "areal_core")


def test_it_is_tried_at_growing_intervals_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    time, work = VirtualClock(), Failing(*(full() for _ in range(12)))
    patience = RetryPolicy(_LIMIT_S, time.clock)
    assert patience.run(work, "write /store/x", Folder()) == "done"
    for number, seconds in enumerate(time.slept):
        longest = min(10.0, 0.25 * 2**number)
        assert longest / 2 <= seconds <= longest
    assert len(time.slept) == 12
    begin, end = told(caplog)
    assert begin == (
        "WARNING storage: can't write /store/x: No space left on device; retrying for up to 1800 s (storage.patience_s)"
    )
    assert end == f"INFO storage: responds again, after {sum(time.slept):.1f} s"
    caplog.clear()
    assert RetryPolicy(8.0, VirtualClock().clock, quiet=True).run(Failing(full()), "write x", Folder()) == "done"
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("limit_s", "passing", "error"),
    [
        (0.0, 0, OSError(13, "denied")),
        (_LIMIT_S, 0, OSError(13, "denied")),
        (_LIMIT_S, 1, OSError(30, "Read-only file system")),  # while it waits
        (0.0, 0, full()),
    ],
)
def test_lasting_error_or_one_without_patience_is_raised_at_once(limit_s: float, passing: int, error: OSError) -> None:
    time, work = VirtualClock(), Failing(*[full()] * passing, error)
    with pytest.raises(type(error), match=error.strerror):
        RetryPolicy(limit_s, time.clock).run(work, "write /store/x", Folder())
    assert (work.tries, len(time.slept)) == (passing + 1, passing)


def test_a_process_that_stood_still_for_longer_tries_once_more() -> None:
    time = VirtualClock()

    def stand_still() -> str:
        if time.clock.now() < 2 * _LIMIT_S:
            time.clock.sleep(2 * _LIMIT_S)
            raise TimeoutError(110, "Connection timed out")
        return "done"

    assert RetryPolicy(_LIMIT_S, time.clock).run(stand_still, "write x", Folder()) == "done"
