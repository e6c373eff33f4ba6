"""Progress of a conversion: a bar on a terminal, a line every ten seconds elsewhere, or JSON lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from ucpstore.cli.output import Output
from ucpstore.engine.sizes import format_bytes
from ucpstore.events import (
    Committed,
    Event,
    Published,
    Resumed,
    Started,
    TaskDone,
    TaskRetried,
    to_json,
)

__all__ = ["Progress"]

_LINE_SECONDS = 10.0


class Progress:
    """A listener for engine events; a context manager."""

    def __init__(self, output: Output, verb: str = "converting") -> None:
        self._output = output
        self._verb = verb
        self._bar: Any = None
        self._task: Any = None
        self._total = self._done = self._tasks = self._tasks_done = self._resumed = 0
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        if self._output.as_json:
            if not isinstance(event, Published) or self._output.verbose:
                self._output.json(to_json(event))
            return
        if self._output.quiet:
            return
        match event:
            case Started():
                self._total, self._tasks = event.nbytes, event.tasks
                self._begin()
            case Resumed():
                self._output.note(
                    f"resuming: {event.tasks} objects ({format_bytes(event.nbytes)}) are done already"
                )
                self._resumed = event.nbytes
                self._advance(event.nbytes, event.tasks)
            case TaskDone():
                self._advance(event.nbytes, 1)
            case TaskRetried():
                self._output.note(
                    f"retry {event.attempt} of {event.key} in {event.delay} s: {event.error}"
                )
            case Committed(already=False) if self._bar is None:
                self._line()
            case Published() | Committed():
                pass

    def _begin(self) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        console = Console(stderr=True, no_color=not self._output.color)
        self._bar = Bar(
            TextColumn(self._verb),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(self._verb, total=self._total)
        self._bar.start()

    def _advance(self, nbytes: int, tasks: int) -> None:
        self._done += nbytes
        self._tasks_done += tasks
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._last >= _LINE_SECONDS:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        elapsed = self._last - self._started
        rate = (self._done - self._resumed) / elapsed if elapsed else 0.0
        self._output.note(
            f"{self._tasks_done}/{self._tasks} objects, {format_bytes(self._done)} of {format_bytes(self._total)},"
            f" {format_bytes(rate)}/s, {elapsed:.0f} s"
        )
