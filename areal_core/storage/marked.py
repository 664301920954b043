"""Compare-and-set on one object of a store, where the answer to a write may be lost on its way."""

from __future__ import annotations

from collections.abc import Callable

from areal_core.storage.objects import ChangedError, MissingError, Storage


class Marked:
    """One object, by its name. Raises StorageError."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name

    def read(self) -> tuple[bytes | None, str | None]:
        """What it holds, and the mark to write over it; None twice where there is none."""
        try:
            return self._storage.get_marked(self._name)
        except MissingError:
            return None, None

    def write(self, data: bytes, mark: str | None, mine: Callable[[bytes | None], bool]) -> str | None:
        """Put `data` over what has this mark, None being no object; returns the new mark, or None where somebody else
        has written meanwhile. `mine` tells whether this writer may write over what it finds then (None: no object), as
        what it has put itself: the answer to that was lost."""
        while True:
            try:
                return self._storage.put_over(self._name, data, mark)
            except ChangedError:
                found, mark = self.read()
                if found == data:
                    return mark
                if not mine(found):
                    return None
