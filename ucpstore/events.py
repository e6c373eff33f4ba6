"""The one stream of events that progress bars, JSON lines and tests subscribe to.

An event is a small immutable record; `to_json` gives its document (``schemas/event.schema.json``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Committed",
    "Event",
    "Listener",
    "Published",
    "Resumed",
    "Started",
    "TaskDone",
    "TaskRetried",
    "to_json",
]


@dataclass(frozen=True, slots=True)
class Started:
    """Work begins: ``tasks`` objects of ``nbytes`` bytes are this run's, those done before included."""

    plan_digest: str
    tasks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Of these, an earlier attempt had ``tasks`` objects of ``nbytes`` bytes durably done."""

    tasks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """One object is written (durable only once `Published` covers it)."""

    task: int
    key: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TaskRetried:
    """Storage failed in a way that may pass; the task is tried again after ``delay`` seconds."""

    task: int
    key: str
    attempt: int
    delay: float
    error: str


@dataclass(frozen=True, slots=True)
class Published:
    """``tasks`` further objects of ``nbytes`` bytes are durable and recorded."""

    tasks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint is visible. ``already`` if it was before this call."""

    url: str
    already: bool


Event = Started | Resumed | TaskDone | TaskRetried | Published | Committed
Listener = Callable[[Event], None]

_NAMES: dict[type, str] = {
    Started: "started",
    Resumed: "resumed",
    TaskDone: "task_done",
    TaskRetried: "task_retried",
    Published: "published",
    Committed: "committed",
}


def to_json(event: Event) -> dict[str, Any]:
    """The event as JSON values, its name under ``event``."""
    return {"event": _NAMES[type(event)], **asdict(event)}
