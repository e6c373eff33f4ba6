"""What can only be read: the writing half of `ucpstore.io.base.Files`, refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NoReturn

from ucpstore.errors import listing
from ucpstore.io.base import FileStat, Sink

__all__ = ["ReadOnly"]


class ReadOnly(ABC):
    """Mix-in of views that have no place of their own to write to."""

    def write(self, name: str, data: bytes) -> FileStat:
        """Refused."""
        self._refuse(name)

    def create(self, name: str, data: bytes) -> bool:
        """Refused."""
        self._refuse(name)

    def sink(self, name: str, nbytes: int, *, guard: Callable[[], object] | None = None) -> Sink:
        """Refused."""
        self._refuse(name)

    def sync(self) -> None:  # noqa: B027 - nothing was written
        """Nothing to do."""

    def creates_exclusively(self) -> bool:
        """Nothing is created at all."""
        return False

    def delete(self, names: Iterable[str]) -> None:
        """Refused."""
        self._refuse(listing(names))

    def free_space(self) -> tuple[int, int] | None:
        """None: nothing is written here."""
        return None

    @abstractmethod
    def _refuse(self, name: str) -> NoReturn:
        """Say that ``name`` cannot be written here."""
