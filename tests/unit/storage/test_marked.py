"""Compare-and-set on one object, where answers are lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.errors import StorageError
from areal_core.storage.marked import Marked
from areal_core.storage.objects import ChangedError, Storage


def starts_with_a(data: bytes | None) -> bool:
    return data is not None and data.startswith(b"a")


def nobody(data: bytes | None) -> bool:
    return False


def test_of_two_writers_one_wins(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path))
    marked = Marked(storage, "object")
    assert marked.read() == (None, None)
    first = marked.write(b"a1", None, nobody)
    assert marked.read() == (b"a1", first)
    assert marked.write(b"b1", None, nobody) is None
    second = marked.write(b"b1", first, nobody)
    assert second is not None
    assert marked.write(b"a2", first, starts_with_a) is None
    assert marked.read() == (b"b1", second)
    storage.delete("object")
    assert marked.write(b"b2", second, starts_with_a) is None  # nothing is written where it has gone
    assert marked.read() == (None, None)


def test_a_write_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage.open(str(tmp_path))
    marked, put = Marked(storage, "object"), storage.put_over

    def tried_again(name: str, data: bytes, mark: str | None) -> str:
        put(name, data, mark)
        raise ChangedError("it is there already: by the first try")

    def unanswered(name: str, data: bytes, mark: str | None) -> str:
        put(name, data, mark)
        raise StorageError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "put_over", tried_again)
        first = marked.write(b"a1", None, nobody)
    assert marked.read() == (b"a1", first)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "put_over", unanswered)
        with pytest.raises(StorageError):
            marked.write(b"a2", first, starts_with_a)
    third = marked.write(b"a3", first, starts_with_a)  # over its own, which it knows no mark of
    assert marked.read() == (b"a3", third)
