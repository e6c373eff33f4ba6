"""Names inside a run, and the pointer that says which attempt is a step.

::

    run/step-00001000/           a checkpoint, by its training step
    run/step-00002000-b/         another attempt at a step, whatever its suffix
    run/step-00002000.json       pointer: which of the attempts is step 2000

Without a pointer the folder without a suffix is the step. A new attempt at a step is written to a folder of its
own and the pointer is swapped then, so that nothing is ever overwritten in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from ucpstore.claims import VERSION, decode, encode
from ucpstore.errors import IntegrityError, Kind, PlanError
from ucpstore.io.base import Files

__all__ = [
    "Pointer",
    "StepName",
    "pointer_name",
    "pointer_step",
    "read_pointer",
    "step_folder",
    "write_pointer",
]

_FOLDER = re.compile(r"step-(?P<step>\d{1,18})(?:-(?P<attempt>[A-Za-z0-9][A-Za-z0-9_.-]{0,63}))?")
_POINTER = re.compile(r"step-(?P<step>\d{1,18})\.json")


@dataclass(frozen=True, slots=True)
class StepName:
    """Name of a folder of a run.

    Attributes
    ----------
    step : int
    attempt : str
        Suffix; empty for the step's first folder.
    """

    step: int
    attempt: str

    @classmethod
    def parse(cls, folder: str) -> StepName | None:
        """``None`` for a folder with another kind of name."""
        match = _FOLDER.fullmatch(folder)
        return None if match is None else cls(int(match["step"]), match["attempt"] or "")


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """``step-N.json``: which folder is the step (``schemas/pointer.schema.json``)."""

    version: str = VERSION
    step: int
    folder: str
    plan_digest: str


def step_folder(step: int) -> str:
    """Name of the folder of a step.

    Examples
    --------
    >>> step_folder(1000)
    'step-00001000'
    """
    if type(step) is not int or not 0 <= step < 10**18:
        raise PlanError(f"step={step!r}: expected a whole number from 0.")
    return f"step-{step:08d}"


def pointer_name(step: int) -> str:
    """Object name of a step's pointer."""
    return f"{step_folder(step)}.json"


def pointer_step(name: str) -> int | None:
    """Step of the pointer with this object name; ``None`` for any other object."""
    match = _POINTER.fullmatch(name)
    if match is None or pointer_name(int(match["step"])) != name:
        return None
    return int(match["step"])


def read_pointer(files: Files, name: str) -> Pointer:
    """The pointer ``name`` of the run ``files``.

    Raises
    ------
    IntegrityError
        It is no pointer, or points elsewhere than to an attempt at its step.
    """
    pointer = decode(files.read(name), Pointer, f"{files.url}/{name}")
    found = StepName.parse(pointer.folder)
    if found is None or found.step != pointer.step or pointer.step != pointer_step(name):
        raise IntegrityError(
            f"{files.url}/{name} points to {pointer.folder!r} for step {pointer.step}: expected a folder of the"
            f" step in its own name.",
            kind=Kind.MALFORMED,
            name=name,
        )
    return pointer


def write_pointer(files: Files, pointer: Pointer) -> None:
    """Swap the pointer of a step; the last writer wins."""
    files.write(pointer_name(pointer.step), encode(pointer))
