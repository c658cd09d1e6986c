"""Progress of transfers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

Progress = Callable[[int, int], None]
"""Receives the number of transferred bytes and the total size."""


class _Counted(io.RawIOBase):
    """File that reports how much of it was read."""

    def __init__(self, file: IO[bytes], size: int, on_progress: Progress) -> None:
        self._file, self._size, self._report, self._done = file, size, on_progress, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._done += len(piece)
        if piece:
            self._report(self._done, self._size)
        return piece


def counted(file: IO[bytes], size: int, on_progress: Progress | None) -> Any:
    """Returns `file`, or a file that reports its progress."""
    return _Counted(file, size, on_progress) if on_progress else file
