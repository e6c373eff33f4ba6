"""Plans: what a conversion will read and write, decided before any work.

A plan is pure. Its digest covers the sources' identity (names, sizes, modification), the metadata and
everything that decides the target's bytes; it is not a list of reads. Workers derive their reads from
the source's generators, so that a plan over 2,000 ranks stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from ucpstore.contracts import Source, Target
from ucpstore.engine.sizes import format_bytes
from ucpstore.errors import Kind, PlanError

__all__ = ["Plan", "make_plan"]

PLAN_VERSION = "1.0"
_SPACE_MARGIN = 1.01
"""Metadata and file system overhead over the objects' bytes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do.

    Attributes
    ----------
    digest : str
        ``sha256:`` of sources, metadata and target. Same digest: same bytes.
    source, target : mapping
        Format, URL and size of both sides.
    parameters, tensors, tasks : int
        Parameters, states (with common tensors) and target objects.
    state_nbytes : int
        Bytes of the states in the source; each is read about once.
    object_nbytes : int
        Bytes of all target objects.
    max_reads : int
        Upper bound of the contiguous source ranges; no range is listed.
    min_memory : int
        Anonymous memory, in bytes, of one task in flight.
    free_nbytes, free_inodes : int or None
        What the destination has left, where it can tell.
    left_out : mapping of str to int
        Tensors of the source, by state, that the target will not hold: derived ones, or not selected.
    warnings : tuple of str
    """

    digest: str
    source: Mapping[str, Any]
    target: Mapping[str, Any]
    parameters: int
    tensors: int
    tasks: int
    state_nbytes: int
    object_nbytes: int
    max_reads: int
    min_memory: int
    free_nbytes: int | None
    free_inodes: int | None
    left_out: Mapping[str, int]
    warnings: tuple[str, ...]

    @property
    def amplification(self) -> float:
        """Bytes written per byte of state."""
        return self.object_nbytes / self.state_nbytes if self.state_nbytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values (``schemas/plan.schema.json``)."""
        return {
            "version": PLAN_VERSION,
            **asdict(self),
            "warnings": list(self.warnings),
            "amplification": round(self.amplification, 6),
        }

    def summary(self) -> str:
        """A few lines for people."""
        free = "unknown" if self.free_nbytes is None else format_bytes(self.free_nbytes)
        rows = [
            ("plan", self.digest),
            (
                "source",
                f"{self.source['url']} ({self.source['format']}, {self.source['files']} files)",
            ),
            ("target", f"{self.target['url']} ({self.target['format']})"),
            (
                "states",
                f"{self.tensors} tensors of {self.parameters} parameters, {format_bytes(self.state_nbytes)}",
            ),
            (
                "objects",
                f"{self.tasks}, {format_bytes(self.object_nbytes)} ({self.amplification:.4f}x)",
            ),
            ("reads", f"at most {self.max_reads} byte ranges"),
            ("memory", f"at least {format_bytes(self.min_memory)} a task in flight"),
            ("free", free),
            *(
                ("left out", f"{name} of {count} parameters")
                for name, count in self.left_out.items()
            ),
            *(("warning", text) for text in self.warnings),
        ]
        return "\n".join(f"{name:<8} {text}" for name, text in rows)

    def check_space(self, *, stored: int = 0) -> None:
        """Refuse a destination that cannot hold the objects.

        Parameters
        ----------
        stored : int, bytes
            Objects of earlier attempts that are there: kept or replaced, they take no further space.

        Raises
        ------
        PlanError
            Too few free bytes or inodes.
        """
        need = int((self.object_nbytes - stored) * _SPACE_MARGIN)
        if self.free_nbytes is not None and self.free_nbytes < need:
            raise PlanError(
                f"{self.target['url']} has {format_bytes(self.free_nbytes)} free,"
                f" the plan needs {format_bytes(need)} more.",
                hint="Free space there or choose another destination.",
                kind=Kind.NO_SPACE,
            )
        need = self.tasks + 3 * self.tensors
        if not stored and self.free_inodes is not None and self.free_inodes < need:
            raise PlanError(
                f"{self.target['url']} has {self.free_inodes} free inodes, the plan makes about {need} files.",
                hint="Free inodes there or choose another destination.",
                kind=Kind.NO_SPACE,
            )


def make_plan(
    source: Source,
    target: Target,
    *,
    states: Sequence[tuple[str, str]],
    free_space: tuple[int, int] | None = None,
    layout: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan the conversion of ``states`` of ``source`` into ``target``.

    Parameters
    ----------
    source, target : Source, Target
    states : sequence of (fqn, state)
        What the target will hold; common tensors under `CommonState.FQN`.
    free_space : (bytes, inodes), optional
        What the destination has left.
    layout : mapping, optional
        Which rank of the target will hold which parts, for display.
    warnings : sequence of str
        What the target does not carry over as it was.
    """
    files = source.files()
    tasks = target.tasks()
    rules = source.common.document.get("patterns")  # they decide what the source's elements are
    # A mapping decides the bytes of every target, also where it leaves no trace in names and shapes.
    mapping = source.parallelism.get("mapping")
    unfrozen = source.parallelism.get("unfrozen")
    document = {
        "version": PLAN_VERSION,
        "source": {
            "format": source.format,
            "files": [(f.name, f.nbytes, f.token) for f in files],
            **({} if rules is None else {"patterns": rules}),
            **({} if mapping is None else {"mapping": mapping}),
            **({} if unfrozen is None else {"unfrozen": unfrozen}),
        },
        "target": target.document(),
    }
    digest = hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()
    specs = [
        source.parameters[fqn].states[state]
        if fqn in source.parameters
        else source.common.tensors[state]
        for fqn, state in states
    ]
    return Plan(
        digest=f"sha256:{digest}",
        source={
            "url": source.url,
            "format": source.format,
            "layout": dict(source.parallelism),
            "files": len(files),
            "nbytes": sum(file.nbytes for file in files),
        },
        target={
            "url": target.url,
            "format": target.format,
            **({} if layout is None else {"layout": dict(layout)}),
        },
        parameters=len({fqn for fqn, _ in states if fqn in source.parameters}),
        tensors=len(states),
        tasks=len(tasks),
        state_nbytes=sum(spec.nbytes for spec in specs),
        object_nbytes=sum(task.nbytes for task in tasks),
        max_reads=sum(source.count_reads(fqn, state) for fqn, state in states),
        min_memory=target.task_memory(),
        free_nbytes=free_space[0] if free_space else None,
        free_inodes=free_space[1] if free_space else None,
        left_out=_left_out(source, states),
        warnings=(*source.warnings, *warnings),
    )


def _left_out(source: Source, states: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Tensors of the source that are not among ``states``, counted by state."""
    kept = set(states)
    found: dict[str, int] = {}
    for fqn, parameter in source.parameters.items():
        for name in parameter.states:
            if (fqn, name) not in kept:
                found[name] = found.get(name, 0) + 1
    return found
