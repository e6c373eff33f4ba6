"""Reading every byte of a checkpoint and checking it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ucpstore.contracts import Arrays, CommonState, Source, StateSpec
from ucpstore.digest import digest_reads
from ucpstore.engine.sizes import format_bytes
from ucpstore.errors import CorruptSourceError, IntegrityError, Kind, NotFoundError, PlanError
from ucpstore.inspect.diff import compare_common, compare_states
from ucpstore.inspect.stream import all_states, block_bytes, in_parallel
from ucpstore.layout.region import Region
from ucpstore.store.completeness import Absence
from ucpstore.store.source import StoreSource
from ucpstore.text import printable

__all__ = ["Finding", "Verification", "verify_listing", "verify_source"]

VERIFICATION_VERSION = "1.0"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a state.

    Attributes
    ----------
    fqn, state : str
    kind : str
        `ucpstore.errors.Kind` value: ``checksum``, ``lost_object``, ``replicas_differ``, ``truncated``, ...
        or, against another checkpoint, ``differs`` and ``missing``.
    message : str
        Names the object and the box.
    """

    fqn: str
    state: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of reading everything.

    Attributes
    ----------
    url : str
    states, nbytes : int
        What was read.
    digests : int
        States whose recorded digest was recomputed.
    findings : tuple of Finding
    quick : bool
        Objects were only listed.
    """

    url: str
    against: str | None
    states: int
    nbytes: int
    digests: int
    findings: tuple[Finding, ...]
    quick: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """As JSON values (``schemas/verification.schema.json``)."""
        return {
            "version": VERIFICATION_VERSION,
            **asdict(self),
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def summary(self) -> str:
        """As text: the findings, then one line."""
        lines = [
            f"{f.kind:<16} {printable(f.fqn)} {printable(f.state)}: {printable(f.message)}"
            for f in self.findings
        ]
        against = f", compared with {self.against}" if self.against else ""
        verdict = "nothing wrong" if self.ok else f"{len(self.findings)} findings"
        if self.quick:
            lines.append(
                f"{self.url}: listed the objects of {self.states} states, read none: {verdict}"
            )
            return "\n".join(lines)
        lines.append(
            f"{self.url}: read {self.states} states, {format_bytes(self.nbytes)}; {self.digests} digests"
            f" recomputed{against}: {verdict}"
        )
        return "\n".join(lines)


_Members = tuple[tuple[str, StateSpec], ...]


def verify_source(source: Source, *, against: Source | None = None) -> Verification:
    """Read every state of ``source``; see `ucpstore.api.verify`."""
    states = {(fqn, spec.name): spec for fqn, spec in all_states(source)}
    units: list[tuple[_Members, str | None]] = []
    alone = dict(states)
    for keys, recorded in source.joint_digests().items():
        units.append((tuple((key[0], alone.pop(key)) for key in keys), recorded))
    units += [(((fqn, spec),), source.digest(fqn, spec.name)) for (fqn, _), spec in alone.items()]
    results = in_parallel(lambda unit: _check(source, against, *unit), units)
    if against is not None:
        results.append(_only_there(source, against, states))
    if isinstance(source, StoreSource):
        # Objects were read; of metadata, only plain Zarr would miss a document.
        results.append([_absence(a) for a in source.absent_objects() if a.expected is None])
    return Verification(
        url=source.url,
        against=against.url if against else None,
        states=len(states),
        nbytes=sum(spec.nbytes for spec in states.values()),
        digests=sum(len(members) for members, recorded in units if recorded is not None),
        findings=tuple(finding for findings in results for finding in findings),
    )


def verify_listing(source: Source) -> Verification:
    """Compare listings with what the root document names; see `ucpstore.api.verify`.

    Raises
    ------
    PlanError
        It is not one of our own checkpoints.
    """
    if not isinstance(source, StoreSource):
        raise PlanError(
            f"{source.url} is {source.format}: only the objects of ucpstore's own checkpoints can be"
            " checked by listings (frameworks' files were, when it was opened).",
            hint="Verify it without quick.",
        )
    return Verification(
        url=source.url,
        against=None,
        states=sum(1 for _ in all_states(source)),
        nbytes=0,
        digests=0,
        findings=tuple(map(_absence, source.absent_objects())),
        quick=True,
    )


def _absence(absence: Absence) -> Finding:
    kind = Kind.LOST_OBJECT if absence.nbytes is None else Kind.TRUNCATED
    return Finding(absence.fqn, absence.state, str(kind), absence.message)


def _only_there(
    source: Source, against: Source, states: Mapping[tuple[str, str], StateSpec]
) -> Sequence[Finding]:
    """What the other checkpoint has beyond the states of this one, and where common states differ."""
    found = [
        Finding(fqn, spec.name, "missing", f"{against.url} has it, {source.url} does not")
        for fqn, spec in all_states(against)
        if (fqn, spec.name) not in states and not spec.derived
    ]
    return found + [
        Finding(CommonState.FQN, "document", "differs", path)
        for path in compare_common(source.common, against.common)
    ]


def _check(
    source: Source, against: Source | None, members: _Members, recorded: str | None
) -> Sequence[Finding]:
    """Check one stored array: a state, or several stacked along a leading axis."""
    fqn, spec = members[0]
    last = members[-1][0]
    name = fqn if len(members) == 1 else f"{fqn} to {last}"
    stacked = len(members) > 1
    shape = (len(members), *spec.shape) if stacked else spec.shape

    def read(region: Region, out: Arrays) -> None:
        if not stacked:
            source.read(fqn, spec.name, region, out, compare=True)
            return
        inner = Region(region.offsets[1:], region.sizes[1:])
        for row in range(region.sizes[0]):
            member, own = members[region.offsets[0] + row]
            source.read(member, own.name, inner, out[row], compare=True)

    try:
        found = digest_reads(shape, spec.dtype, read, block_bytes=block_bytes(source))
        if recorded is not None and str(found) != recorded:
            message = f"the bytes have digest {found}, the checkpoint recorded {recorded}"
            return [Finding(name, spec.name, str(Kind.CHECKSUM), message)]
        if against is None:
            return []
        return [f for member, own in members for f in _compare(source, against, member, own)]
    except (IntegrityError, CorruptSourceError, NotFoundError) as error:
        named = str(error.context.get("fqn", name))
        return [Finding(named, spec.name, str(error.kind), str(error))]


def _compare(source: Source, against: Source, fqn: str, spec: StateSpec) -> Sequence[Finding]:
    if fqn == CommonState.FQN:
        other = against.common.tensors.get(spec.name)
    else:
        parameter = against.parameters.get(fqn)
        other = parameter.states.get(spec.name) if parameter else None
    if other is None and spec.derived:
        return []
    result = compare_states(source, against, fqn, spec.name, spec, other)
    if result.status == "equal":
        return []
    if result.status == "removed":
        detail = f"{against.url} does not have it"
    elif result.status == "changed":
        detail = (
            f"{result.changed} of {result.elements} elements differ, the first at {result.first}"
        )
    else:
        detail = f"{result.status} differs: {result.detail}"
    return [Finding(fqn, spec.name, "differs", detail)]
