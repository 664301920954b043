"""The notice that a spot node is to be reclaimed: two minutes before."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flows.machine import reclaimed

_LOOK_S = 5.0


class Notice:
    """A context that looks for it, in a thread."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._over = threading.Event()
        self._text: str | None = None
        self._heed: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._look, name="notice", daemon=True)

    def __enter__(self) -> Notice:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def text(self) -> str | None:
        """What the cloud has said; None so far."""
        return self._text

    def heed(self, action: Callable[[str], None]) -> None:
        """Have `action` called with the notice, in a thread, once there is one."""
        self._heed = action
        if self._text is not None:
            action(self._text)

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            if text := reclaimed():
                self._text = " ".join(text.split())
                self._log(f"this node is to be reclaimed: {self._text}")
                if self._heed is not None:
                    self._heed(self._text)
                return
