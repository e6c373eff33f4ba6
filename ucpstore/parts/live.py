"""Saving a running job: every rank writes what it holds straight into one of our stores.

The ranks' memories are one source (`ucpstore.pieces.PieceSource`) whose files are the ranks. Whole objects
are written by the rank that holds most of them, from its own memory; what others hold of them is staged.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from ucpstore.claims import INDEX, VERSION, current_claim, decode, dump_json
from ucpstore.contracts import CommonState, ParameterSpec, Role, SourceFile, StateSpec
from ucpstore.dtypes import itemsize
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.engine.run import Report, Workers
from ucpstore.engine.worker import Settings
from ucpstore.errors import IntegrityError, Kind, LayoutError, PlanError, UcpStoreError, listing
from ucpstore.events import Listener
from ucpstore.io.base import Files, FileStat
from ucpstore.layout.geometry import Block, Blocks, FlatRanges, Geometry
from ucpstore.layout.region import Region
from ucpstore.parts.exchange import Exchange
from ucpstore.parts.files import SharedFiles
from ucpstore.parts.held import Held, HeldBytes, file_of, memory_token
from ucpstore.parts.work import divide, run_parts
from ucpstore.pieces import Bound, Buffer, PieceSource
from ucpstore.store.grid import plan_arrays
from ucpstore.store.target import ZarrTarget

__all__ = ["save_parts"]

FORMAT = "live"


class _Part(msgspec.Struct, frozen=True):
    """A `Held` without its elements; ``hash`` is that of its bytes."""

    fqn: str
    state: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    count: int
    hash: str

    @property
    def nbytes(self) -> int:
        return self.count * itemsize(self.dtype)


class _Rank(msgspec.Struct, frozen=True):
    """What one rank holds. ``attempt`` is different in every process, so that no two are taken for one."""

    version: str
    rank: int
    world: int
    attempt: str
    parts: tuple[_Part, ...]
    common: dict[str, Any] | None = None
    parallelism: dict[str, Any] | None = None
    aliases: dict[str, tuple[str, ...]] | None = None
    order: tuple[str, ...] | None = None


def save_parts(
    files: Files,
    parts: Sequence[Held],
    *,
    rank: int,
    world: int,
    facts: Mapping[str, Any],
    workers: Workers,
    settings: Settings,
    timeout: float,
    wait: bool,
    emit: Listener | None,
) -> Report:
    """Be one rank of a save. See `ucpstore.api.save_rank`.

    Parameters
    ----------
    files : Files
        The destination.
    parts : sequence of Held
    rank, world : int
    facts : mapping
        ``common``, ``parallelism``, ``aliases`` and ``order``.
    workers, settings
        How the objects are written.
    timeout : float, seconds
    wait : bool
    emit : callable, optional
    """
    if not (type(rank) is int and type(world) is int and 0 <= rank < world):
        raise PlanError(f"cannot save as rank {rank!r} of {world!r}: expected 0 <= rank < world.")
    memory = HeldBytes(rank, parts)
    document = _describe(parts, memory, rank=rank, world=world, facts=facts)
    exchange = Exchange(files, rank, world, timeout=timeout)
    documents = exchange.agree(document)
    source, target, plan = _open(files, memory, documents, rank)
    holders = {file_of(other): other for other in range(world)}
    try:
        exchange.prepare(lambda: _supersede(files, target, plan))
        return run_parts(
            (source, target),
            plan,
            divide(source, target, holders, rank=rank, world=world),
            exchange=exchange,
            files=source.shared,
            workers=workers,
            settings=settings,
            wait=wait,
            emit=emit,
        )
    except UcpStoreError as error:
        exchange.give_up(error)
        raise


class _LiveSource(PieceSource):
    """The memories of all ranks."""

    shared: SharedFiles


def _describe(
    parts: Sequence[Held],
    memory: HeldBytes,
    *,
    rank: int,
    world: int,
    facts: Mapping[str, Any],
) -> bytes:
    rows = []
    for part, dtype, digest in zip(parts, memory.dtypes, memory.hashes, strict=True):
        place = part.place
        rows.append(
            {
                "fqn": part.fqn,
                "state": part.state,
                "role": str(part.purpose),
                "dtype": dtype,
                "shape": list(part.shape),
                "offsets": list(place.offsets),
                "sizes": list(place.sizes),
                "start": part.start or 0,
                "count": _count(part),
                "hash": digest,
            }
        )
    found = {
        "version": VERSION,
        "rank": rank,
        "world": world,
        "attempt": uuid.uuid4().hex,
        "parts": rows,
        **facts,
    }
    return dump_json(found, f"what rank {rank} saves")


def _count(part: Held) -> int:
    size = part.data.numel() if hasattr(part.data, "numel") else part.data.size
    return int(size)


def _open(
    files: Files, memory: HeldBytes, documents: Sequence[bytes], rank: int
) -> tuple[_LiveSource, ZarrTarget, Plan]:
    """Source, target and plan; the same for all ranks."""
    ranks = [decode(data, _Rank, f"{INDEX}/{index}") for index, data in enumerate(documents)]
    tables = {
        file_of(one.rank): FileStat(
            file_of(one.rank),
            sum(part.nbytes for part in one.parts),
            memory_token([part.hash for part in one.parts]),
        )
        for one in ranks
    }
    url = f"the memory of {len(ranks)} ranks"
    shared = SharedFiles(url, memory, mine=[file_of(rank)], stats=tables)  # type: ignore[arg-type]
    parameters, bound = _assemble(ranks)
    aliases = _agreed(ranks, "aliases", {})
    place = {fqn: index for index, fqn in enumerate(_agreed(ranks, "order", ()))}
    source = _LiveSource(
        format=FORMAT,
        files=shared,
        file_table=[SourceFile.of(stat) for stat in tables.values()],
        parameters={
            fqn: ParameterSpec(
                fqn,
                states,
                trainable=any(spec.role is Role.MASTER_WEIGHT for spec in states.values()),
                aliases=tuple(aliases.get(fqn, ())),
            )
            for fqn, states in sorted(
                parameters.items(), key=lambda item: place.get(item[0], len(place))
            )
        },
        common=CommonState(_agreed(ranks, "common", {})),
        parallelism=_agreed(ranks, "parallelism", {}),
        warnings=[],
        bound=bound,
    )
    source.shared = shared
    arrays = plan_arrays(source)
    counters = source.common.document.get("counters")
    step = counters.get("global_steps") if isinstance(counters, Mapping) else None
    target = ZarrTarget(files, arrays, source=source, step=step if type(step) is int else None)
    members = [member for array in arrays for member in array.members]
    plan = make_plan(source, target, states=members, free_space=files.free_space())
    return source, target, plan


def _agreed(ranks: Sequence[_Rank], name: str, default: Any) -> Any:
    """What those ranks say that say anything."""
    said = {one.rank: getattr(one, name) for one in ranks if getattr(one, name) is not None}
    if not said:
        return default
    first, value = next(iter(said.items()))
    for rank, other in said.items():
        if other != value:
            raise LayoutError(
                f"ranks {first} and {rank} save different {name}: found"
                f" {_first_difference(value, other)}; expected the same, or from one rank only.",
                kind=Kind.REPLICAS_DIFFER,
            )
    return value


def _first_difference(left: Any, right: Any) -> str:
    if isinstance(left, tuple):
        left, right = dict(enumerate(left)), dict(enumerate(right))
    key = next(key for key in {**left, **right} if left.get(key) != right.get(key))
    return f"{key}: {json.dumps(left.get(key)):.80} and {json.dumps(right.get(key)):.80}"


def _supersede(files: Files, target: ZarrTarget, plan: Plan) -> None:
    """Free the claim of an earlier save: what its processes held is gone, or they are superseded."""
    _, claim = current_claim(files)
    held = None if claim is None else claim.plan_digest
    if held not in (None, plan.digest) and files.stat(_marker(str(held))) is not None:
        target.abandon()
    files.create(_marker(plan.digest), b"save\n")


def _marker(digest: str) -> str:
    return f"{INDEX}/plans/{digest.partition(':')[2]}"


# --------------------------------------------------------------------- assembly


def _assemble(
    ranks: Sequence[_Rank],
) -> tuple[dict[str, dict[str, StateSpec]], dict[tuple[str, str], Bound]]:
    """Parameters and the places of their elements, from all that the ranks say."""
    holders: dict[tuple[str, str], dict[tuple[Any, ...], list[tuple[int, int, _Part]]]] = {}
    for index, one in enumerate(ranks):
        if (one.rank, one.world) != (index, len(ranks)):
            raise IntegrityError(
                f"rank {one.rank} of {one.world} calls itself {index} of {len(ranks)}.",
                kind=Kind.MALFORMED,
            )
        offset = 0
        for part in one.parts:
            place = (part.offsets, part.sizes, part.start, part.count)
            state = holders.setdefault((part.fqn, part.state), {})
            state.setdefault(place, []).append((index, offset, part))
            offset += part.nbytes
    loads = [0] * len(ranks)
    parameters: dict[str, dict[str, StateSpec]] = {}
    bound = {}
    for (fqn, name), places in holders.items():
        spec = _one_spec(fqn, name, places)
        parameters.setdefault(fqn, {})[name] = spec
        chosen = [_choose(copies, loads) for copies in places.values()]
        buffers = [Buffer(index, offset, part.nbytes) for index, offset, part in chosen]
        geometry = _geometry(fqn, spec, [(index, part) for index, _, part in chosen])
        bound[fqn, name] = Bound(geometry, buffers, spec.dtype)
    return parameters, bound


def _one_spec(
    fqn: str, state: str, places: Mapping[tuple[Any, ...], list[tuple[int, int, _Part]]]
) -> StateSpec:
    found: dict[tuple[Any, ...], int] = {}
    for index, _, part in (copy for copies in places.values() for copy in copies):
        found.setdefault((part.shape, part.dtype, part.role), index)
    if len(found) > 1:
        ways = [
            f"{dtype} {list(shape)} ({role}) on rank {rank}"
            for (shape, dtype, role), rank in found.items()
        ]
        raise LayoutError(
            f"{state} of {fqn!r} is not the same tensor on all ranks: found {listing(ways)}.",
            kind=Kind.SHAPE,
            fqn=fqn,
            state=state,
        )
    shape, dtype, role = next(iter(found))
    return StateSpec(state, role, shape, dtype)


def _choose(copies: Sequence[tuple[int, int, _Part]], loads: list[int]) -> tuple[int, int, _Part]:
    """Of replicas, which must be equal, that of the rank with the fewest bytes to write so far."""
    first, _, part = copies[0]
    for index, _, other in copies:
        if other.hash != part.hash:
            raise IntegrityError(
                f"{part.state} of {part.fqn!r}: ranks {first} and {index} hold the same"
                f" {part.count} elements of box {Region(part.offsets, part.sizes)}, but other values.",
                kind=Kind.REPLICAS_DIFFER,
                hint="Save the copy that counts from one rank only.",
            )
    chosen = min(copies, key=lambda copy: (loads[copy[0]], copy[0]))
    loads[chosen[0]] += part.nbytes
    return chosen


def _geometry(fqn: str, spec: StateSpec, parts: Sequence[tuple[int, _Part]]) -> Geometry:
    """Boxes of the tensor, each of flat ranges; slot ``i`` is part ``i``."""
    boxes: dict[Region, list[tuple[int, int, int, int]]] = {}
    for slot, (rank, part) in enumerate(parts):
        box = Region(part.offsets, part.sizes)
        boxes.setdefault(box, []).append((part.start, part.start + part.count, slot, rank))
    blocks = [
        Block(box, _flat(fqn, spec, box, sorted(ranges)), (0,) * box.ndim)
        for box, ranges in boxes.items()
    ]
    if len(blocks) == 1 and blocks[0].region == Region.full(spec.shape):
        return blocks[0].child
    return Blocks(spec.shape, tuple(blocks))


def _flat(
    fqn: str, spec: StateSpec, box: Region, ranges: Sequence[tuple[int, int, int, int]]
) -> FlatRanges:
    kept = [one for one in ranges if one[0] < one[1]]
    for (_, stop, _, first), (start, _, _, second) in pairwise(kept):
        if start != stop:
            what = "both hold" if start < stop else "do not hold"
            low, high = sorted((start, stop))
            raise LayoutError(
                f"{fqn!r} ({spec.name}): ranks {first} and {second} {what} flat elements {low} to {high - 1} of"
                f" box {box} of shape {list(spec.shape)}.",
                kind=Kind.OVERLAP if start < stop else Kind.GAP,
            )
    bounds = [one[0] for one in kept] + [kept[-1][1]] if kept else [0]
    return FlatRanges(box.sizes, tuple(bounds), tuple(one[2] for one in kept), (0,) * len(kept))
