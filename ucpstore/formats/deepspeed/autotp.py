"""How the slices of tensor-parallel ranks make up a parameter.

DeepSpeed records this in ``universal_checkpoint_info``: geometrically in ``affine_map`` (0.19.8,
``checkpoint/affine.py``), and as lists of regexes by category (``checkpoint/constants.py``), which
``merge_tp_slices`` of ``checkpoint/ds_to_universal.py`` applies in a fixed order with `re.match`. The
map wins over the lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, PatternError, UnsupportedSourceError
from ucpstore.formats.deepspeed.checks import integer, integers, mapping_of, sequence_of
from ucpstore.layout.coverage import uncovered
from ucpstore.layout.geometry import Block, Blocks, Concat, Copies, Geometry, Part
from ucpstore.layout.region import Region, row_major_strides

__all__ = ["Merged", "TensorParallel"]

_AFFINE_VERSION = 1
_UNEVEN_VERSION = 0.4
"""First ``universal_checkpoint_version`` that records the widths of sub-parameters."""

_Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Merged:
    """A parameter put together from its tensor-parallel slices.

    Attributes
    ----------
    geometry : Geometry
        Of the logical tensor.
    pattern : str
        In words: ``"replicate"``, ``"shard(0)"``, ``"shard-nc(0)"``, ``"partial"``, ``"blocks"``.
    stages : int
        Pipeline stages that have a copy.
    """

    geometry: Geometry
    pattern: str
    stages: int = 1


class TensorParallel:
    """The sharding rules of one checkpoint.

    Parameters
    ----------
    info : mapping or None
        ``universal_checkpoint_info`` of the model file.
    degree : int
        Tensor-parallel ranks.

    Raises
    ------
    UnsupportedSourceError
        The affine map is of a later version.
    PatternError
        A pattern is not a regular expression.
    """

    def __init__(self, info: Mapping[str, Any] | None, degree: int) -> None:
        self._info = mapping_of(info or {}, "universal_checkpoint_info")
        self._degree = degree
        affine = mapping_of(self._info.get("affine_map") or {}, "affine_map")
        version = affine.get("version", _AFFINE_VERSION)
        if version != _AFFINE_VERSION:
            raise UnsupportedSourceError(
                f"affine_map of universal_checkpoint_info has version {version!r}, expected {_AFFINE_VERSION}."
            )
        self._maps = mapping_of(affine.get("params", {}), "affine_map")
        self._by_map = _Names("affine_map", self._maps)
        self._replicated = self._names("tp_replicated_parameter_patterns")
        self._averaged = self._names("parameter_to_average_patterns")
        self._halves = self._names("parameter_with_2_sub_params_cat_dim_0")
        self._rows = self._names("parameter_with_row_parallelism_patterns")
        self._vocabulary = self._names("vocabulary_parameter_patterns")
        self._refused = self._names("autotp_unsupported_parameter_patterns")
        self._widths = mapping_of(
            self._info.get("sub_param_shard_widths") or {}, "sub_param_shard_widths"
        )
        self._fused: dict[str, Mapping[str, Any]] = {}
        for entry in sequence_of(
            self._info.get("parameter_with_sub_params") or (), "parameter_with_sub_params"
        ):
            fused = mapping_of(entry, "parameter_with_sub_params")
            patterns = sequence_of(fused.get("patterns"), "parameter_with_sub_params")
            self._fused.update((pattern, fused) for pattern in map(str, patterns))
        self._by_fused = _Names("parameter_with_sub_params", self._fused)

    def _names(self, key: str) -> _Names:
        patterns = self._info.get(key) or ()
        if not isinstance(patterns, Mapping):
            patterns = sequence_of(patterns, key)
        return _Names(key, patterns)

    def merge(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """Put the slices of all ranks together.

        Parameters
        ----------
        fqn : str
        children : sequence of Geometry
            The local tensor of every tensor-parallel rank, in rank order.

        Raises
        ------
        PatternError
            No rule or several rules apply to the parameter, or the rule does not fit its slices.
        UnsupportedSourceError
            The rule cannot be followed exactly (scaled pieces, layouts that DeepSpeed itself refuses).
        """
        pattern = self._by_map.match(fqn)
        if pattern is not None:
            merged = _from_affine(fqn, self._maps[pattern], children)
            return merged if self._degree > 1 else Merged(merged.geometry, "")
        if self._degree == 1:
            return self._strip_vocabulary(fqn, Merged(children[0], ""))
        refused = self._refused.match(fqn)
        if refused is not None:
            reason = mapping_of(self._info["autotp_unsupported_parameter_patterns"], "patterns")[
                refused
            ]
            raise UnsupportedSourceError(
                f"the tensor-parallel layout of {fqn!r} is not described in the checkpoint: {reason}."
            )
        return self._strip_vocabulary(fqn, self._from_lists(fqn, children))

    def merge_buffer(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        """Put a module's buffer together: tensor parallelism does not cut buffers, all ranks hold it.

        Raises
        ------
        PatternError
            The ranks hold tensors of different shapes.
        """
        if self._degree == 1:
            return Merged(children[0], "")
        return _replicate(fqn, children)

    def _from_lists(self, fqn: str, children: Sequence[Geometry]) -> Merged:
        if self._replicated.match(fqn) is not None:
            return _replicate(fqn, children)
        if self._averaged.match(fqn) is not None:
            return _replicate(fqn, children, partial=True)
        if self._halves.match(fqn) is not None:
            return _sections(fqn, 0, _halves(fqn, children), children)
        fused = self._by_fused.match(fqn)
        if fused is not None:
            entry = self._fused[fused]
            dim = integer(entry.get("partition_dim", 0), "partition_dim")
            return _sections(fqn, dim, self._section_widths(fqn, fused, children), children)
        if self._rows.match(fqn) is not None:
            return _concat(fqn, 1, children)
        if not self._info or (len(children[0].shape) < 2 and not self._replicated):
            found = "has no universal_checkpoint_info" if not self._info else "does not say"
            raise PatternError(
                f"the checkpoint {found} how {fqn!r} lies on {self._degree} tensor-parallel ranks: found local"
                f" shapes {_shapes(children)}.",
                hint="Give patterns for tensor parallelism, such as tp_replicated_parameter_patterns for norms"
                " and parameter_with_row_parallelism_patterns for row-parallel weights.",
                fqn=fqn,
            )
        return _concat(fqn, 0, children)

    def _section_widths(
        self, fqn: str, pattern: str, children: Sequence[Geometry]
    ) -> list[tuple[int, ...]]:
        """Per section (sub-parameter), the width that every rank holds."""
        recorded = self._widths.get(pattern)
        if recorded is not None:
            sections = sequence_of(recorded, "sub_param_shard_widths")
            return [integers(widths, f"shard widths of {fqn!r}") for widths in sections]
        version = self._info.get("universal_checkpoint_version", 0.0)
        if not isinstance(version, int | float):
            raise CorruptSourceError(
                f"universal_checkpoint_version is {version!r:.40}, expected a number."
            )
        entry = self._fused[pattern]
        dim = integer(entry.get("partition_dim", 0), "partition_dim")
        spec = sequence_of(entry.get("shape", ()), "shape of parameter_with_sub_params")
        if version >= _UNEVEN_VERSION or dim >= len(spec) or dim >= len(children[0].shape):
            raise PatternError(
                f"{fqn!r} has several sub-parameters, but no sub_param_shard_widths are recorded for"
                f" {pattern!r} (universal_checkpoint_version {version}).",
                fqn=fqn,
            )
        sizes = spec[dim]
        if isinstance(sizes, int):  # before 0.4: the number of equal sub-parameters
            total = sum(child.shape[dim] for child in children)
            if sizes < 1 or total % sizes:
                raise PatternError(
                    f"{fqn!r}: {total} indices along dim {dim} are no {sizes} equal sub-parameters.",
                    fqn=fqn,
                )
            sizes = (total // sizes,) * sizes
        sizes = integers(sizes, f"sub-parameters of {fqn!r}")
        uneven = [size for size in sizes if size % self._degree]
        if uneven:
            raise PatternError(
                f"{fqn!r}: sub-parameters of {uneven} indices do not divide by {self._degree} ranks, and their"
                " widths per rank are not recorded.",
                fqn=fqn,
            )
        return [(size // self._degree,) * self._degree for size in sizes]

    def _strip_vocabulary(self, fqn: str, merged: Merged) -> Merged:
        """Drop the rows that only pad the vocabulary (``ds_to_universal.py``, end of the merge).

        AutoTP never pads, so rows are only dropped where the padded size is recorded and fits.
        """
        if self._vocabulary.match(fqn) is None:
            return merged
        if not merged.geometry.shape:
            return merged
        rows, *rest = merged.geometry.shape
        padded = self._info.get("padded_vocab_size")
        true = self._info.get("original_vocab_size")
        if padded != rows or not isinstance(true, int) or not 0 < true < rows:
            return merged
        part = Part(true, merged.geometry, 0)
        pattern = f"{merged.pattern} pad(0)".strip()
        return Merged(Concat((true, *rest), 0, (part,)), pattern)


# The patterns come from an untrusted file, and a backtracking matcher has no time limit: what is allowed is
# at most cubic in the length of a name, which covers what DeepSpeed and Megatron write.
_MAX_PATTERN = 1000
_MAX_UNBOUNDED = 3
_QUANTIFIED_GROUP = re.compile(r"(?<!\\)\)[*+?{]")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|(?<!\\)\{\d*,\d*\}")


class _Names:
    """The regexes of one list, matched as DeepSpeed does; exact names need no scan."""

    def __init__(self, key: str, patterns: Iterable[str]) -> None:
        self._key = key
        self._exact: dict[str, str] = {}
        self._regexes: list[re.Pattern[str]] = []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise PatternError(f"{key}: found {pattern!r}, expected a regular expression.")
            name = _literal(pattern)
            if name is not None:
                self._exact[name] = pattern
                continue
            if (
                len(pattern) > _MAX_PATTERN
                or _QUANTIFIED_GROUP.search(pattern)
                or (len(_UNBOUNDED.findall(pattern)) > _MAX_UNBOUNDED)
            ):
                raise PatternError(
                    f"{key}: {pattern[:200]!r} could take very long to match: expected at most"
                    f" {_MAX_UNBOUNDED} unbounded repeats, none of them of a group.",
                    kind=Kind.UNSUPPORTED,
                )
            try:
                self._regexes.append(re.compile(pattern))
            except re.error as error:
                raise PatternError(
                    f"{key}: {pattern!r} is no regular expression: {error}."
                ) from error

    def __bool__(self) -> bool:
        return bool(self._exact or self._regexes)

    def match(self, fqn: str) -> str | None:
        """The pattern that matches, if any."""
        found = [regex.pattern for regex in self._regexes if regex.match(fqn)]
        if fqn in self._exact:
            found.append(self._exact[fqn])
        if len(found) > 1:
            raise PatternError(
                f"{len(found)} patterns of {self._key} match {fqn!r}: {', '.join(map(repr, found))}.",
                kind=Kind.AMBIGUOUS,
                fqn=fqn,
            )
        return found[0] if found else None


def _literal(pattern: str) -> str | None:
    """The one name that ``^escaped name$`` matches; AutoTP writes a pattern per parameter."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    body = pattern[1:-1]
    name = re.sub(r"\\(.)", r"\1", body)
    return name if re.escape(name) == body else None


def _replicate(fqn: str, children: Sequence[Geometry], *, partial: bool = False) -> Merged:
    if any(child.shape != children[0].shape for child in children):
        raise PatternError(
            f"{fqn!r} should be replicated on all tensor-parallel ranks, but the local shapes are"
            f" {_shapes(children)}.",
            fqn=fqn,
        )
    if partial:
        return Merged(Copies(tuple(children), "average"), "partial")
    return Merged(Copies(tuple(children), "equal"), "replicate")


def _concat(fqn: str, dim: int, children: Sequence[Geometry]) -> Merged:
    widths = [(_width(fqn, dim, child),) for child in children]
    merged = _sections(fqn, dim, [tuple(w for (w,) in widths)], children)
    return Merged(merged.geometry, f"shard({dim})")


def _halves(fqn: str, children: Sequence[Geometry]) -> list[tuple[int, ...]]:
    """Two sections; like `torch.chunk`, an odd width gives the first one more."""
    widths = [_width(fqn, 0, child) for child in children]
    first = tuple((width + 1) // 2 for width in widths)
    return [first, tuple(w - f for w, f in zip(widths, first, strict=True))]


def _sections(
    fqn: str, dim: int, sections: Sequence[tuple[int, ...]], children: Sequence[Geometry]
) -> Merged:
    """Rank t's local tensor is its slice of every section, one after another along ``dim``."""
    widths = [_width(fqn, dim, child) for child in children]
    fits = all(len(section) == len(children) for section in sections) and widths == [
        sum(per_rank) for per_rank in zip(*sections, strict=False)
    ]
    rest = {child.shape[:dim] + child.shape[dim + 1 :] for child in children}
    if not fits or len(rest) > 1:
        raise PatternError(
            f"the slices of {fqn!r} do not fit together along dim {dim}: local shapes {_shapes(children)},"
            f" sections of widths {[list(section) for section in sections]} per rank.",
            fqn=fqn,
        )
    parts = []
    begin = [0] * len(children)
    for section in sections:
        for rank, (width, child) in enumerate(zip(section, children, strict=True)):
            parts.append(Part(width, child, begin[rank]))
            begin[rank] += width
    shape = (*children[0].shape[:dim], sum(widths), *children[0].shape[dim + 1 :])
    return Merged(Concat(shape, dim, tuple(parts)), f"shard-nc({dim})")


def _width(fqn: str, dim: int, child: Geometry) -> int:
    if dim >= len(child.shape):
        raise PatternError(
            f"{fqn!r} should be cut along dim {dim}, but its local shape is {list(child.shape)}.",
            fqn=fqn,
        )
    return child.shape[dim]


def _shapes(children: Sequence[Geometry]) -> str:
    return ", ".join(str(list(child.shape)) for child in children)


def _from_affine(fqn: str, entry: object, children: Sequence[Geometry]) -> Merged:
    """Geometry from an affine map: boxes of the full tensor and where they lie in each shard.

    ``source`` and ``dest`` of a piece are `torch.as_strided` arguments, in elements, into the full
    tensor and into the shard; ``shard = full * scale``.
    """
    what = f"affine map of {fqn!r}"
    entry = mapping_of(entry, what)
    shape = integers(entry.get("logical_shape"), what)
    ranks = {
        integer(rank, what): value for rank, value in mapping_of(entry.get("ranks"), what).items()
    }
    if set(ranks) != set(range(len(children))):
        raise PatternError(
            f"the {what} describes the ranks {sorted(ranks)}, but there are {len(children)}.",
            fqn=fqn,
        )
    holders: dict[Region, list[Geometry]] = {}
    whole: list[Region] = []
    for rank, child in enumerate(children):
        value = mapping_of(ranks[rank], what)
        local = integers(value.get("shard_shape"), what)
        if local != child.shape:
            raise PatternError(
                f"the {what} says that rank {rank} holds {list(local)}, but it holds {list(child.shape)}.",
                fqn=fqn,
            )
        pieces = list(_pieces(what, value, shape, local))
        _require_tiled(what, rank, [dest for _, dest in pieces], local)
        for source, dest in pieces:
            if dest == Region.full(local):
                whole.append(source)
            holders.setdefault(source, []).append(_window(child, dest))
    blocks = []
    for region, copies in holders.items():
        child = copies[0] if len(copies) == 1 else Copies(tuple(copies), "equal")
        blocks.append(Block(region, child, (0,) * region.ndim))
    if len(blocks) == 1 and blocks[0].region == Region.full(shape):
        return Merged(blocks[0].child, "replicate")
    dim = _cut_dim(whole, shape)
    if dim is not None and len(whole) == len(blocks) == len(children):
        return _concat(fqn, dim, children)
    return Merged(Blocks(shape, tuple(blocks)), "blocks")


def _require_tiled(what: str, rank: int, boxes: Sequence[Region], local: tuple[int, ...]) -> None:
    """Every element of the shard must be in exactly one piece, as `ParamAffineMap.validate` demands."""
    full = Region.full(local)
    total = sum(box.volume for box in boxes)
    holes = uncovered(full, boxes) if total == full.volume else []
    if total != full.volume or holes:
        where = f"{holes[0]} is in none and another box in two" if holes else f"they hold {total}"
        raise PatternError(
            f"the {what} should place each of the {full.volume} elements of rank {rank} in one piece, but {where}.",
            kind=Kind.OVERLAP if holes or total > full.volume else Kind.GAP,
        )


def _pieces(
    what: str, rank: Mapping[str, Any], shape: tuple[int, ...], local: tuple[int, ...]
) -> Iterator[tuple[Region, Region]]:
    """Box in the full tensor and box in the shard of every piece that has elements."""
    for item in sequence_of(rank.get("pieces"), what):
        piece = mapping_of(item, what)
        if piece.get("scale", 1.0) != 1.0:
            raise UnsupportedSourceError(
                f"the {what} scales a piece by {piece['scale']}: a scaled copy cannot be read exactly."
            )
        sizes = integers(piece.get("shape"), what)
        if math.prod(sizes):
            yield (
                _box(what, sizes, piece.get("source"), shape),
                _box(what, sizes, piece.get("dest"), local),
            )


def _box(what: str, sizes: tuple[int, ...], view: object, shape: tuple[int, ...]) -> Region:
    """The box of a tensor of ``shape`` that an `as_strided` view is."""
    offset, strides = sequence_of(view, what, length=2)
    offset, strides = integer(offset, what), integers(strides, what)
    steps = row_major_strides(shape)
    plain = len(sizes) == len(shape) == len(strides) and all(
        size <= 1 or stride == step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    )
    offsets = []
    rest = offset
    for step in steps:
        index, rest = divmod(rest, step)
        offsets.append(index)
    box = Region(tuple(offsets), sizes) if plain else None
    if box is None or rest or offset < 0 or not Region.full(shape).contains(box):
        raise UnsupportedSourceError(
            f"the {what} has a piece of shape {list(sizes)} at offset {offset} with strides {list(strides)}: that"
            f" is no box of a tensor of shape {list(shape)}."
        )
    return box


def _window(child: Geometry, region: Region) -> Geometry:
    """The part of ``child`` inside ``region``, as a tensor of its own."""
    if region == Region.full(child.shape):
        return child
    full = Region.full(region.sizes)
    return Blocks(region.sizes, (Block(full, child, region.offsets),))


def _cut_dim(boxes: Sequence[Region], shape: tuple[int, ...]) -> int | None:
    """The dim along which the boxes, in this order, tile the tensor; ``None`` if there is none."""
    for dim in range(len(shape)):
        position = 0
        for box in boxes:
            across = box.offsets[:dim] + box.offsets[dim + 1 :]
            sizes = box.sizes[:dim] + box.sizes[dim + 1 :]
            if (
                any(across)
                or sizes != shape[:dim] + shape[dim + 1 :]
                or box.offsets[dim] != position
            ):
                break
            position += box.sizes[dim]
        else:
            if boxes and position == shape[dim]:
                return dim
    return None
