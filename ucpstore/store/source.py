"""`StoreSource`: a committed checkpoint of our own as a `ucpstore.contracts.Source`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ucpstore.claims import COMMIT, DELETION
from ucpstore.contracts import (
    Arrays,
    CommonState,
    Detection,
    Fragment,
    ParameterSpec,
    SourceFile,
    StateSpec,
)
from ucpstore.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    Kind,
    LayoutError,
    ParameterNotFoundError,
    UncommittedError,
    UnrecognizedSourceError,
    close_names,
)
from ucpstore.io.base import Files
from ucpstore.layout.region import Region
from ucpstore.layout.rules import Patterns
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.completeness import Absence, absent_objects, require_objects
from ucpstore.store.documents import FORMAT, ROOT, RootAttributes, load_json, root_attributes
from ucpstore.store.hierarchy import Place, check_root, read_hierarchy
from ucpstore.store.protocol import current_claim, read_root
from ucpstore.store.reading import ArrayReader

if TYPE_CHECKING:
    import tensorstore as ts
    import zarr

__all__ = ["StoreFormat", "StoreSource", "zarr_group"]


class StoreSource:
    """A committed checkpoint, opened with one read of its root document.

    Parameters
    ----------
    files : Files
    patterns : Patterns, optional
        Rules that come before those that the checkpoint keeps.

    Attributes
    ----------
    attributes : RootAttributes
        What the root says about the checkpoint.

    Raises
    ------
    UncommittedError
        A conversion into this URL has not been finished.
    UnrecognizedSourceError
        Something else is at the URL.
    FormatVersionError
        Written by an unknown major version.
    IntegrityError
        The root document is damaged.
    """

    format = FORMAT

    def __init__(self, files: Files, patterns: Patterns | None = None) -> None:
        self.url = files.url
        self.is_local = files.is_local
        self._files = files
        self.attributes, root = _open_root(files)
        check_root(root, f"{files.url}/{ROOT}")
        hierarchy = read_hierarchy(root, f"{files.url}/{ROOT}")
        self.parameters = hierarchy.parameters
        self.common = _with_patterns(hierarchy.common, patterns)
        parallelism = self.attributes.source.get("parallelism")
        self.parallelism: Mapping[str, Any] = parallelism if isinstance(parallelism, dict) else {}
        self.warnings: Sequence[str] = _unused(patterns, self.parameters)
        self._metadata = hierarchy.metadata
        self._nodes = hierarchy.nodes
        self._places = hierarchy.places
        self._root: list[SourceFile] | None = None
        self._reader = ArrayReader(files, hierarchy.metadata)

    def __repr__(self) -> str:
        return f"<StoreSource {self.url!r}: {len(self.parameters)} parameters>"

    def files(self) -> Sequence[SourceFile]:
        """The root document: it names and digests everything else, and is never overwritten.

        Looked at once, so that a checkpoint that was deleted and made anew is seen to have changed.
        """
        if self._root is None:
            self._root = list(self.current_files())
        return self._root

    def current_files(self) -> Sequence[SourceFile]:
        stat = self._files.stat(ROOT)
        return [SourceFile(ROOT, -1, "") if stat is None else SourceFile.of(stat)]

    @property
    def storage(self) -> Files:
        """The checkpoint's folder."""
        return self._files

    def absent_objects(self) -> list[Absence]:
        """Objects that the root names and listings do not show, or show with another size."""
        return absent_objects(self._files, self._nodes, self._metadata)

    def object_names(self) -> set[str]:
        """Names of all objects and documents below the root."""
        names = {f"{path}/{ROOT}" for path in self._nodes}
        for array in self.array_specs():
            names.update(map(array.object_key, range(array.num_objects)))
        return names

    def require_objects(self) -> None:
        """Refuse a checkpoint that lacks objects: two listings, nothing is read.

        Raises
        ------
        IntegrityError
            Kind ``LOST_OBJECT``.
        """
        require_objects(self.url, self.absent_objects())

    def is_own_encoding(self, array: ArraySpec) -> bool:
        """Whether the array's objects are as `ucpstore.store.encoder` writes them."""
        return self._reader.is_own_encoding(array)

    def array_specs(self) -> list[ArraySpec]:
        """All stored arrays, sorted by path."""
        return [
            ArraySpec.from_metadata(path, self._metadata[path]) for path in sorted(self._metadata)
        ]

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        """See `ucpstore.contracts.Source.read`. There is one copy of everything to ``compare``.

        Raises
        ------
        IntegrityError
            An object is lost (``LOST_OBJECT``) or damaged (``CHECKSUM``), or the whole checkpoint was
            deleted since it was opened (``DELETED``).
        """
        spec = self._spec(fqn, state)
        if not Region.full(spec.shape).contains(region) or out.shape != region.sizes:
            raise LayoutError(
                f"cannot read {fqn!r} ({state}) {region} into an array of shape {out.shape}: "
                f"the state has shape {spec.shape}.",
                fqn=fqn,
                state=state,
            )
        if region.volume == 0:
            return
        array, place = self._array(fqn, state)
        what = f"cannot read {fqn!r} ({state})"
        if place.member is not None:
            region, out = _in_stack(region, place.member), out[None]
        try:
            self._reader.read(array, region, out, what=what, fqn=fqn, state=state)
        except IntegrityError as error:
            if error.kind == Kind.LOST_OBJECT and self._files.stat(ROOT) is None:
                raise self._deleted(what, fqn=fqn, state=state) from error
            raise

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        """Shard borders: they are where the source's slices were cut, or lie within one slice."""
        self._spec(fqn, state)
        array, place = self._array(fqn, state)
        cuts = tuple(tuple(range(s, n, s)) for s, n in zip(array.shard, array.shape, strict=True))
        return cuts if place.member is None else cuts[1:]

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        """The stored objects that hold a part of the region, each with the box that it adds."""
        self._spec(fqn, state)
        array, place = self._array(fqn, state)
        if place.member is not None:
            region = _in_stack(region, place.member)
        found = []
        for index in array.objects_in(region):
            part = array.object_region(index).intersect(region)
            if part is not None and place.member is not None:
                part = Region(part.offsets[1:], part.sizes[1:])
            if part is not None:
                key, nbytes = array.object_key(index), array.object_nbytes(index)
                found.append(Fragment(part, key, 0, nbytes))
        return found

    def count_reads(self, fqn: str, state: str) -> int:
        """Objects that hold the state: each is one contiguous range."""
        spec = self._spec(fqn, state)
        array, place = self._array(fqn, state)
        region = Region.full(spec.shape)
        if place.member is not None:
            region = _in_stack(region, place.member)
        return sum(1 for _ in array.objects_in(region))

    def digest(self, fqn: str, state: str) -> str | None:
        """The recorded digest; ``None`` for a state that is stored in a stack."""
        self._spec(fqn, state)
        array, place = self._array(fqn, state)
        digest = array.attributes.get("digest")
        return digest if place.member is None and isinstance(digest, str) else None

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        """Digests of stacks: members in order of the leading axis -> digest of the whole array."""
        members: dict[str, dict[int, tuple[str, str]]] = {}
        for key, place in self._places.items():
            if place.member is not None:
                members.setdefault(place.path, {})[place.member] = key
        found = {}
        for path, by_index in members.items():
            recorded = ArraySpec.from_metadata(path, self._metadata[path]).attributes.get("digest")
            if recorded is not None:
                found[tuple(by_index[index] for index in sorted(by_index))] = recorded
        return found

    def tensorstore(self, fqn: str, state: str) -> ts.TensorStore:
        """The state as a read-only TensorStore (bfloat16 and float8 as the integers of their bits)."""
        self._spec(fqn, state)
        array, place = self._array(fqn, state)
        store = self._reader.open(array)
        return store if place.member is None else store[place.member]

    def zarr_group(self) -> zarr.Group:
        """The whole checkpoint as a read-only group of zarr-python."""
        return zarr_group(self._files)

    def _deleted(self, what: str, **context: Any) -> IntegrityError:
        return IntegrityError(
            f"{what}: {self.url} was deleted after it was opened; its root document is gone, too.",
            kind=Kind.DELETED,
            hint="Open another checkpoint of the run.",
            url=self.url,
            **context,
        )

    def _array(self, fqn: str, state: str) -> tuple[ArraySpec, Place]:
        place = self._places[fqn, state]
        return ArraySpec.from_metadata(place.path, self._metadata[place.path]), place

    def _spec(self, fqn: str, state: str) -> StateSpec:
        if fqn == CommonState.FQN:
            states = self.common.tensors
        elif fqn in self.parameters:
            states = self.parameters[fqn].states
        else:
            raise ParameterNotFoundError(
                f"{self.url}: no parameter {fqn!r} among {len(self.parameters)}.",
                hint=close_names(fqn, list(self.parameters)),
                fqn=fqn,
            )
        if state not in states:
            raise ParameterNotFoundError(
                f"{self.url}: {fqn!r} has no state {state!r}; it has {', '.join(states)}.",
                hint=close_names(state, list(states)),
                fqn=fqn,
                state=state,
            )
        return states[state]


def _in_stack(region: Region, member: int) -> Region:
    return Region((member, *region.offsets), (1, *region.sizes))


def _open_root(files: Files) -> tuple[RootAttributes, Mapping[str, Any]]:
    data = read_root(files)
    document: Any = None
    if data is not None:
        try:
            document = load_json(data)
        except ValueError as error:
            raise UnrecognizedSourceError(f"{files.url}/{ROOT} is not JSON: {error}.") from error
    if isinstance(document, dict):
        attributes = root_attributes(document, f"{files.url}/{ROOT}")
        if attributes is not None:
            return attributes, document
    number, claim = current_claim(files)
    if claim is not None and claim.plan_digest == DELETION:
        raise UncommittedError(
            f"{files.url} is being deleted: a gc removed its root document.",
            hint="Open another checkpoint of the run.",
            url=files.url,
        )
    if number:
        found = "was abandoned" if claim is None or claim.plan_digest is None else "is unfinished"
        raise UncommittedError(
            f"{files.url} is not committed: a conversion into it {found}.",
            hint="Run the same `ucpstore convert` command again to finish it.",
            url=files.url,
        )
    found = "no root document" if data is None else "a Zarr hierarchy without attributes.ucpstore"
    raise UnrecognizedSourceError(
        f"{files.url} is not a ucpstore checkpoint: found {found}, expected {ROOT} with a plan digest.",
        hint="Open other Zarr hierarchies with zarr.open_group.",
        url=files.url,
    )


def _with_patterns(common: CommonState, patterns: Patterns | None) -> CommonState:
    if not patterns:
        return common
    kept = Patterns.from_json(common.document.get("patterns", {}))
    document = {**common.document, "patterns": (patterns + kept).to_json()}
    return CommonState(document, common.tensors)


def _unused(patterns: Patterns | None, parameters: Mapping[str, ParameterSpec]) -> Sequence[str]:
    if not patterns:
        return ()
    shapes = {
        fqn: [len(state.shape) for state in parameter.states.values()]
        for fqn, parameter in parameters.items()
    }
    return patterns.warnings({fqn: max(ndims, default=0) for fqn, ndims in shapes.items()})


def zarr_group(files: Files) -> zarr.Group:
    """A checkpoint as a read-only group of zarr-python.

    Raises
    ------
    CheckpointNotFoundError
        There is no Zarr group.
    """
    import zarr

    options = None if files.is_local else dict(files.options)
    try:
        return zarr.open_group(files.url, mode="r", zarr_format=3, storage_options=options)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"no Zarr group at {files.url}.", url=files.url) from error


class StoreFormat:
    """`ucpstore.contracts.Format` of our own checkpoints."""

    name = FORMAT

    def detect(self, files: Files) -> Detection:
        """Look for a root document or for claims."""
        if files.stat(ROOT) is not None:
            return Detection(True, f"has {ROOT}")
        if files.stat(COMMIT) is not None:
            return Detection(False, f"has {COMMIT}: converted into a framework's own format")
        if current_claim(files)[0]:
            return Detection(True, "has .ucpstore/claims: an unfinished conversion")
        return Detection(False, f"no {ROOT}")

    def open(
        self,
        files: Files,
        *,
        tag: str | None = None,
        patterns: Patterns | None = None,
        rank: int | None = None,
    ) -> StoreSource:
        """Open a committed checkpoint; ``patterns`` come before those that it keeps for a target's ranks.

        Raises
        ------
        UnrecognizedSourceError
            There are neither tags nor ranks.
        """
        if tag is not None:
            raise UnrecognizedSourceError(
                f"{files.url} holds one checkpoint and no tags: found tag {tag!r}, expected none."
            )
        if rank is not None:
            raise UnrecognizedSourceError(
                f"{files.url} holds whole parameters and no ranks: found rank {rank}, expected none."
            )
        return StoreSource(files, patterns)
