"""A `Source` seen through a mapping: other names, and tensors that are affine images of the source's.

Nothing is copied: a region of a target tensor is cut into boxes of the source's tensors, which are read
straight into the caller's array, or through a small block where the elements lie in another order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucpstore.contracts import (
    Arrays,
    CommonState,
    Fragment,
    ParameterSpec,
    Source,
    SourceFile,
    StateSpec,
)
from ucpstore.errors import (
    Kind,
    LayoutError,
    ParameterNotFoundError,
    PatternError,
    UnsupportedSourceError,
    close_names,
    listing,
)
from ucpstore.layout.region import Region
from ucpstore.mapping.affine import Part, View
from ucpstore.mapping.common import map_document
from ucpstore.mapping.describe import boxes, moved_region, view_cuts
from ucpstore.mapping.fill import BLOCK, LOCAL_WASTE, Filler
from ucpstore.mapping.mapping import Mapping as NameMapping
from ucpstore.mapping.mapping import Pass
from ucpstore.mapping.resolve import Made, Named, Problem, resolve
from ucpstore.mapping.transforms import Identity

__all__ = ["MappedSource", "map_source"]

_MAX_TOLD = 20
"""Problems in a message; the error's context has all."""


def map_source(source: Source, mapping: NameMapping) -> Source:
    """``source`` through every pass of a mapping.

    Raises
    ------
    PatternError
        Names are left over, taken twice, or do not fit the shapes; all problems are told
        (``context["problems"]``).
    """
    for index, one in enumerate(mapping.passes):
        source = MappedSource(source, one, digest=NameMapping((one,)).digest, number=index)
    return source


@dataclass(frozen=True, slots=True)
class _Image:
    """A parameter of the target and where each of its states comes from."""

    made: Made
    views: Mapping[str, View]
    """By state."""

    @property
    def is_same(self) -> bool:
        """Whether only the name differs."""
        return isinstance(self.made.transform, Identity)


class MappedSource:
    """One pass of a mapping over a source. Picklable if the source is.

    Parameters
    ----------
    source : Source
    entries : Pass
    digest : str
        Of the pass; recorded in ``parallelism``, and so part of what a plan's digest covers.
    number : int
        Of the pass, for messages.

    Raises
    ------
    PatternError
        See `map_source`.
    """

    def __init__(self, source: Source, entries: Pass, *, digest: str, number: int = 0) -> None:
        self._source = source
        self.format = source.format
        self.url = source.url
        self.is_local = source.is_local
        named = {fqn: Named(_shape(spec), spec.aliases) for fqn, spec in source.parameters.items()}
        resolution = resolve(entries, named)
        problems = [*resolution.problems]
        self._images: dict[str, _Image] = {}
        self.parameters: Mapping[str, ParameterSpec] = {}
        parameters = {}
        for made in resolution.made:
            image = _image(source, made, problems)
            self._images[made.fqn] = image
            parameters[made.fqn] = _spec(source, image)
        mapped = map_document(source.common.document, resolution, entries.order)
        problems += mapped.problems
        if problems:
            raise _refusal(source, problems, number)
        self.parameters = parameters
        self.common = CommonState(mapped.document, source.common.tensors)
        self.parallelism: Mapping[str, Any] = _with_mapping(
            source, digest, reordered=mapped.reordered, ordered=bool(entries.order)
        )
        left = (
            [
                f"the mapping leaves out {len(resolution.dropped)} parameters: {listing(resolution.dropped)}."
            ]
            if resolution.dropped
            else []
        )
        self.warnings: Sequence[str] = [*source.warnings, *left, *mapped.warnings]

    def __repr__(self) -> str:
        return f"<MappedSource of {self._source!r}: {len(self.parameters)} parameters>"

    def files(self) -> Sequence[SourceFile]:
        return self._source.files()

    def current_files(self) -> Sequence[SourceFile]:
        return self._source.current_files()

    def read(
        self, fqn: str, state: str, region: Region, out: Arrays, *, compare: bool = False
    ) -> None:
        image = self._image(fqn, state)
        if image is None or image.is_same:
            name = fqn if image is None else image.made.members[0]
            self._source.read(name, state, region, out, compare=compare)
            return
        view = image.views[state]
        if not Region.full(view.shape).contains(region) or out.shape != region.sizes:
            raise LayoutError(
                f"cannot read {fqn!r} ({state}) {region} into an array of shape {out.shape}: the state has shape"
                f" {view.shape}.",
                fqn=fqn,
                state=state,
            )

        def read(name: str, box: Region, into: Arrays) -> None:
            self._source.read(name, state, box, into, compare=compare)

        if not region.volume:
            return
        filler = Filler(read, region, out, LOCAL_WASTE if self.is_local else BLOCK)
        for part in view.query(region):
            filler.fill(part)

    def cuts(self, fqn: str, state: str) -> tuple[tuple[int, ...], ...]:
        image = self._image(fqn, state)
        if image is None or image.is_same:
            return self._source.cuts(self._origin(fqn, image), state)
        return view_cuts(image.views[state], lambda name: self._source.cuts(name, state))

    def fragments(self, fqn: str, state: str, region: Region) -> Sequence[Fragment]:
        image = self._image(fqn, state)
        if image is None or image.is_same:
            return self._source.fragments(self._origin(fqn, image), state, region)
        return [
            replace(fragment, region=moved)
            for part in image.views[state].query(region)
            for box in boxes(part)
            for fragment in self._source.fragments(box.source, state, box.source_region)
            for moved in [moved_region(box, fragment.region)]
        ]

    def count_reads(self, fqn: str, state: str) -> int:
        image = self._image(fqn, state)
        if image is None or image.is_same:
            return self._source.count_reads(self._origin(fqn, image), state)
        return sum(
            self._source.count_reads(part.source, state) + self._cut_runs(part, state)
            for part in image.views[state].parts
        )

    def _cut_runs(self, part: Part, state: str) -> int:
        """Ranges that are made at most where a part is cut out of its tensor; none for whole ones."""
        shape = self._source.parameters[part.source].states[state].shape
        if part.volume == math.prod(shape):
            return 0
        last = len(shape) - 1
        inner = (a.size for a in part.axes if a.source == last and a.source_step == 1)
        return part.volume // max(math.prod(inner), 1)

    def digest(self, fqn: str, state: str) -> str | None:
        image = self._image(fqn, state)
        if image is None or image.is_same:
            return self._source.digest(self._origin(fqn, image), state)
        return None  # recorded digests are of the source's tensors

    def joint_digests(self) -> Mapping[tuple[tuple[str, str], ...], str]:
        """Of stacked states whose members are all here, unchanged but for their names."""
        names = {i.made.members[0]: fqn for fqn, i in self._images.items() if i.is_same}
        found = {}
        for members, digest in self._source.joint_digests().items():
            if all(fqn in names for fqn, _ in members):
                found[tuple((names[fqn], state) for fqn, state in members)] = digest
        return found

    def tensorstore(self, fqn: str, state: str) -> Any:
        """The stored array of a state of which only the name differs.

        Raises
        ------
        UnsupportedSourceError
            There is none.
        """
        image = self._image(fqn, state)
        stored = getattr(self._source, "tensorstore", None)
        if stored is None or (image is not None and not image.is_same):
            raise UnsupportedSourceError(
                f"{fqn!r} ({state}) of {self.url} is seen through a mapping: there is no stored array of it.",
                hint="Read it, or convert with the mapping first.",
                url=self.url,
            )
        return stored(self._origin(fqn, image), state)

    def zarr_group(self) -> Any:
        """There is none.

        Raises
        ------
        UnsupportedSourceError
        """
        raise UnsupportedSourceError(
            f"{self.url} is seen through a mapping: there is no Zarr hierarchy with these names.",
            hint="Convert with the mapping first, or open it without.",
            url=self.url,
        )

    def _image(self, fqn: str, state: str) -> _Image | None:
        """Where a state comes from; None for tensors of the common state.

        Raises
        ------
        ParameterNotFoundError
        """
        if fqn == CommonState.FQN:
            return None
        if fqn not in self._images:
            raise ParameterNotFoundError(
                f"{self.url}: no parameter {fqn!r} under this mapping",
                hint=close_names(fqn, list(self._images)),
                fqn=fqn,
            )
        image = self._images[fqn]
        if state not in image.views:
            raise ParameterNotFoundError(
                f"{self.url}: parameter {fqn!r} has no state {state!r}; it has {', '.join(image.views)}.",
                fqn=fqn,
                state=state,
            )
        return image

    @staticmethod
    def _origin(fqn: str, image: _Image | None) -> str:
        return fqn if image is None else image.made.members[0]


# ------------------------------------------------------------------------ opening


def _shape(spec: ParameterSpec) -> tuple[int, ...]:
    return next((state.shape for state in spec.states.values()), ())


def _image(source: Source, made: Made, problems: list[Problem]) -> _Image:
    """Check that the members go together, and make the views of all states."""
    specs = [source.parameters[name] for name in made.members]
    before = len(problems)
    for name, spec in zip(made.members, specs, strict=True):
        difference = _difference(specs[0], spec)
        if difference:
            problems.append(
                Problem(
                    Kind.UNSUPPORTED,
                    f"{made.fqn!r} cannot join {made.members[0]!r} and {name!r}: {difference}",
                )
            )
        shapes = {state.shape for state in spec.states.values()}
        if len(shapes) > 1 and not isinstance(made.transform, Identity):
            problems.append(
                Problem(
                    Kind.SHAPE,
                    f"{name!r} has states of different shapes ({', '.join(map(str, sorted(shapes)))}): only its name"
                    " can be mapped",
                )
            )
    views: dict[str, View] = {}
    made_of: dict[tuple[tuple[int, ...], ...], View] = {}
    for state in specs[0].states if len(problems) == before else ():
        shapes_of = tuple(spec.states[state].shape for spec in specs)
        if shapes_of not in made_of:
            try:
                made_of[shapes_of] = made.transform.view(
                    list(zip(made.members, shapes_of, strict=True))
                )
            except LayoutError as error:
                problems.append(Problem(error.kind, f"{made.fqn!r}: {error}"))
                break
        views[state] = made_of[shapes_of]
    return _Image(made, views)


def _difference(first: ParameterSpec, other: ParameterSpec) -> str:
    """Why two parameters cannot be parts of one; empty if they can."""
    if first.trainable != other.trainable:
        return "one is trained, the other is not"
    if first.states.keys() != other.states.keys():
        return f"they have the states {', '.join(first.states)} and {', '.join(other.states)}"
    for name, spec in first.states.items():
        twin = other.states[name]
        mine, theirs = ((one.role, one.dtype, one.derived) for one in (spec, twin))
        if mine != theirs:
            return (
                f"their {name} is of {spec.dtype} ({spec.role}) and of {twin.dtype} ({twin.role})"
            )
    return ""


def _spec(source: Source, image: _Image) -> ParameterSpec:
    made = image.made
    specs = [source.parameters[name] for name in made.members]
    first = specs[0]
    states: Mapping[str, StateSpec] = {
        name: replace(first.states[name], shape=view.shape) for name, view in image.views.items()
    }
    attributes = {
        key: value
        for key, value in first.attributes.items()
        if all(spec.attributes.get(key) == value for spec in specs)
    }
    if made.members != (made.fqn,) or not image.is_same:
        attributes["source_names"] = list(made.members)
    return ParameterSpec(
        fqn=made.fqn,
        states=states,
        trainable=first.trainable,
        aliases=tuple(made.aliases),
        pattern=" | ".join(dict.fromkeys(spec.pattern for spec in specs)),
        attributes=attributes,
    )


def _with_mapping(source: Source, digest: str, *, reordered: bool, ordered: bool) -> dict[str, Any]:
    """The facts about the source, with those about the mapping.

    ``mapping``: digests of the passes so far, and of the rules that were left out. ``mapping_reorders``:
    parameters of a group changed places, their number or their order. ``mapping_ordered``: they are in an order
    that the mapping gave.
    """
    before = [source.parallelism["mapping"]] if "mapping" in source.parallelism else []
    rules = source.common.document.get("patterns")
    if rules is not None:
        text = json.dumps(rules, sort_keys=True)
        before.append(f"patterns sha256:{hashlib.sha256(text.encode()).hexdigest()}")
    found = {**source.parallelism, "mapping": ", ".join([*before, digest])}
    if reordered:
        found["mapping_reorders"] = True
        found.pop("mapping_ordered", None)
    if ordered:
        found["mapping_ordered"] = True
    return found


def _refusal(source: Source, problems: Sequence[Problem], number: int) -> PatternError:
    which = f" (pass {number})" if number else ""
    texts = [problem.text.rstrip(".") for problem in problems]
    told = [f"({i}) {text}" for i, text in enumerate(texts[:_MAX_TOLD], 1)]
    more = len(texts) - len(told)
    told += [f"and {more} more"] if more else []
    return PatternError(
        f"{source.url} cannot be mapped{which}, {len(texts)} problems: {'; '.join(told)}.",
        kind=problems[0].kind,
        hint="Every parameter and buffer must be taken by exactly one entry; say keep or drop for the others.",
        problems=texts,
    )
