"""The metadata documents of a checkpoint: what is written beside the objects, and how it is read back.

::

    zarr.json                       root: attributes.ucpstore, consolidated metadata of everything below
    params/zarr.json
    params/<fqn>/zarr.json          attributes.ucpstore: fqn, pattern, aliases, trainable, states, ...
    params/<fqn>/<state>/zarr.json  array; attributes.ucpstore: role, dtype, source_dtype, digest
    common/zarr.json                attributes: the common state's document
    common/<name>/zarr.json         tensors that the document refers to

All of it is deterministic, and the root alone is enough to open the checkpoint. The consolidated metadata
has the form that zarr-python 3 writes (``kind: inline``), so that it is used by plain Zarr too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import xxhash

from ucpstore.contracts import CommonState, ParameterSpec, StateSpec
from ucpstore.dtypes import itemsize
from ucpstore.errors import FormatVersionError, IntegrityError
from ucpstore.io.base import check_name
from ucpstore.store.arrays import ArraySpec
from ucpstore.store.documents import FORMAT, RootAttributes, dump_json, encode, load_json

__all__ = [
    "COMMON",
    "PARAMS",
    "Hierarchy",
    "Place",
    "check_root",
    "checksum",
    "child_documents",
    "children_of_root",
    "read_hierarchy",
    "root_document",
]

PARAMS = "params"
COMMON = "common"


_MAX_STACK = 10_000_000
_MAX_EXTENT = 1 << 62


class _Described(msgspec.Struct, frozen=True):
    """Attributes of a parameter's group."""

    fqn: str
    index: int
    pattern: str
    trainable: bool
    aliases: tuple[str, ...]
    states: tuple[str, ...]
    derived: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a state is stored: a whole array, or entry ``member`` of its leading axis."""

    path: str
    member: int | None = None


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Everything that a root document describes.

    Attributes
    ----------
    metadata : mapping of str to mapping
        ``zarr.json`` of every array, by path.
    places : mapping of (fqn, state) to Place
        Common tensors are under `CommonState.FQN`.
    parameters : mapping of str to ParameterSpec
        In the source's order.
    common : CommonState
    nodes : sequence of str
        Paths of all groups and arrays.
    """

    metadata: Mapping[str, Mapping[str, Any]]
    places: Mapping[tuple[str, str], Place]
    parameters: Mapping[str, ParameterSpec]
    common: CommonState
    nodes: Sequence[str]


def child_documents(
    arrays: Sequence[ArraySpec],
    parameters: Mapping[str, ParameterSpec],
    common: Mapping[str, Any],
    *,
    digests: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, bytes]]:
    """Path and ``zarr.json`` of every node below the root, sorted by path.

    Parameters
    ----------
    arrays : sequence of ArraySpec
    parameters : mapping of str to ParameterSpec
        The source's; those without an array are left out.
    common : mapping
        Document of the common state.
    digests : mapping of str to str, optional
        Digest of every array, by path.
    """
    groups: dict[str, dict[str, Any]] = {PARAMS: {}, COMMON: dict(common)}
    order = {fqn: index for index, fqn in enumerate(parameters)}
    by_group: dict[str, list[ArraySpec]] = {}
    for array in arrays:
        by_group.setdefault(_parent(array.path), []).append(array)
    for path, members in by_group.items():
        if path != COMMON:
            groups[path] = {FORMAT: _describe_group(members, parameters, order)}
    extra: dict[str, Any] = {}
    specs = {array.path: array for array in arrays}
    for path in sorted([*groups, *specs]):
        if path in groups:
            document = {"zarr_format": 3, "node_type": "group", "attributes": groups[path]}
        else:
            extra = {"digest": digests[path]} if digests else {}
            document = specs[path].metadata(extra)
        yield path, dump_json(document, f"{path}/zarr.json")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _describe_group(
    arrays: Sequence[ArraySpec], parameters: Mapping[str, ParameterSpec], order: Mapping[str, int]
) -> dict[str, Any]:
    """Attributes of a parameter's group, or of the group of stacked parameters."""
    states: dict[str, set[str]] = {}
    for array in arrays:
        for fqn, state in array.members:
            states.setdefault(fqn, set()).add(state)
    described = [
        msgspec.structs.asdict(_describe(parameters[fqn], order[fqn], names))
        for fqn, names in states.items()
    ]
    return {"stack": described} if any(array.stacked for array in arrays) else described[0]


def _describe(spec: ParameterSpec, index: int, states: set[str]) -> _Described:
    return _Described(
        fqn=spec.fqn,
        index=index,
        pattern=spec.pattern,
        trainable=spec.trainable,
        aliases=tuple(spec.aliases),
        states=tuple(name for name in spec.states if name in states),
        derived=tuple(n for n, state in spec.states.items() if n in states and state.derived),
        attributes=dict(spec.attributes),
    )


def root_document(attributes: RootAttributes, children: Sequence[tuple[str, bytes]]) -> bytes:
    """The root's ``zarr.json``, put together from the children's bytes, never held as objects.

    Parameters
    ----------
    attributes : RootAttributes
        Its checksum is filled in here.
    children : sequence of (str, bytes)
        Sorted by path.
    """
    nodes = b",".join(
        dump_json(path, path).strip() + b":" + _consolidated(document)
        for path, document in children
    )
    described = msgspec.to_builtins(attributes)
    parsed = ((path, load_json(_consolidated(document))) for path, document in children)
    sealed = msgspec.structs.replace(attributes, checksum=checksum(described, parsed))
    return (
        b'{"attributes":{"' + FORMAT.encode() + b'":' + encode(sealed).strip() + b"},"
        b'"consolidated_metadata":{"kind":"inline","metadata":{'
        + nodes
        + b'},"must_understand":false},'
        b'"node_type":"group","zarr_format":3}\n'
    )


def _consolidated(document: bytes) -> bytes:
    """A child inside the root: zarr-python gives every group an empty consolidated part of its own."""
    text = document.strip()
    if not text.endswith(b'"node_type":"group","zarr_format":3}'):
        return text
    return text[:-1] + (
        b',"consolidated_metadata":{"kind":"inline","metadata":{},"must_understand":false}}'
    )


def children_of_root(document: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Path and ``zarr.json`` of every node, as `child_documents` wrote them, from a root document.

    Parameters
    ----------
    document : mapping
        The root document, parsed and checked (`check_root`).
    """
    for path, found in sorted(document["consolidated_metadata"]["metadata"].items()):
        check_name(path)
        node = {n: v for n, v in found.items() if (n, v) != ("storage_transformers", [])}
        if node["node_type"] == "group":
            node.pop("consolidated_metadata", None)
        yield path, dump_json(node, f"{path}/zarr.json")


def checksum(attributes: Mapping[str, Any], nodes: Iterable[tuple[str, Any]]) -> str:
    """Guards what no chunk's crc32c does: names, shapes, hyper-parameters, the whole common state.

    It is of the values, not of the bytes, so that another way of writing the same JSON does no harm.

    Parameters
    ----------
    attributes : mapping
        The root's own; their checksum is left out.
    nodes : iterable of (path, node)
        Consolidated metadata, sorted by path.
    """
    digest = xxhash.xxh3_128()
    own = {name: value for name, value in attributes.items() if name != "checksum"}
    for path, found in itertools.chain([("", own)], nodes):
        # zarr-python adds this whenever it writes a root again, for a user's attribute say.
        node = {n: v for n, v in found.items() if (n, v) != ("storage_transformers", [])}
        digest.update(path.encode("utf-8", "surrogatepass") + b"\0")
        try:
            digest.update(msgspec.json.encode(node, order="deterministic"))
        except UnicodeEncodeError:  # lone surrogates
            digest.update(dump_json(node, path))
        digest.update(b"\0")
    return f"xxh3-128:{digest.hexdigest()}"


def check_root(document: Mapping[str, Any], name: str) -> None:
    """Refuse a root document that is not as it was written.

    Raises
    ------
    IntegrityError
        Kind ``CHECKSUM``.
    """
    try:
        attributes = document["attributes"][FORMAT]
        nodes = document["consolidated_metadata"]["metadata"]
        recorded, found = attributes.get("checksum"), checksum(attributes, sorted(nodes.items()))
    except (KeyError, TypeError, AttributeError):
        return  # `read_hierarchy` says what is missing
    if recorded and recorded != found:
        raise IntegrityError(
            f"{name} is not as it was written: its content has the checksum {found}, it recorded {recorded}.",
            hint="Restore it from a copy of the checkpoint, or convert the source again.",
            name=name,
        )


def read_hierarchy(document: Mapping[str, Any], name: str) -> Hierarchy:
    """Rebuild what `root_document` described.

    Parameters
    ----------
    document : mapping
        The root document, parsed.
    name : str
        What to call it in errors.

    Raises
    ------
    FormatVersionError
        The document has another form.
    """
    try:
        nodes = document["consolidated_metadata"]["metadata"]
        arrays = {path: node for path, node in nodes.items() if node["node_type"] == "array"}
        groups = {path: node["attributes"] for path, node in nodes.items() if path not in arrays}
        common = dict(groups.pop(COMMON).items())
        groups.pop(PARAMS)
        described = [spec for attributes in groups.values() for spec in _described(attributes)]
        described.sort(key=lambda spec: spec.index)
        states, places = _states(arrays)
        parameters = {spec.fqn: _parameter(spec, states) for spec in described}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatVersionError(
            f"{name} lacks or has another form of {error}, expected a document that ucpstore wrote.",
            hint="Read it with plain Zarr to see what it holds.",
            name=name,
        ) from error
    tensors = {state: spec for (fqn, state), spec in states.items() if fqn == CommonState.FQN}
    return Hierarchy(arrays, places, parameters, CommonState(common, tensors), tuple(nodes))


def _described(attributes: Mapping[str, Any]) -> list[_Described]:
    ours = attributes[FORMAT]
    return [msgspec.convert(one, _Described) for one in ours.get("stack", [ours])]


def _states(
    arrays: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[tuple[str, str], StateSpec], dict[tuple[str, str], Place]]:
    states: dict[tuple[str, str], StateSpec] = {}
    places: dict[tuple[str, str], Place] = {}
    for path, node in arrays.items():
        _check_stack(path, node)
        array = ArraySpec.from_metadata(check_name(path), node)
        _check_array(array)
        shape = array.shape[1:] if array.stacked else array.shape
        for index, (fqn, state) in enumerate(array.members):
            states[fqn, state] = StateSpec(state, array.role, shape, array.logical_dtype)
            places[fqn, state] = Place(path, index if array.stacked else None)
    return states, places


def _check_stack(path: str, node: Mapping[str, Any]) -> None:
    """Refuse a stack whose members cannot be listed."""
    stack = node["attributes"][FORMAT].get("stack")
    if stack is None:
        return
    first, count = stack["first"], stack["count"]
    if not (type(first) is type(count) is int and 0 <= count <= _MAX_STACK):
        raise ValueError(f"the stack of {path!r}")


def _check_array(array: ArraySpec) -> None:
    """Refuse extents and names of another type; TensorStore checks the rest of the metadata."""
    extents = (*array.shape, *array.shard, *array.tile)
    if not all(type(n) is int and n < _MAX_EXTENT for n in extents):
        raise TypeError(f"the grid of {array.path!r}")
    names = [name for member in array.members for name in member]
    if not all(isinstance(name, str) for name in [*names, array.dtype, array.source_dtype]):
        raise TypeError(f"the names of {array.path!r}")
    if math.prod(array.shape) * itemsize(array.dtype) >= _MAX_EXTENT:
        raise ValueError(f"the shape of {array.path!r}")
    itemsize(array.logical_dtype)


def _parameter(described: _Described, states: Mapping[tuple[str, str], StateSpec]) -> ParameterSpec:
    found = {}
    for name in described.states:
        spec = states[described.fqn, name]
        found[name] = replace(spec, derived=name in described.derived)
    return ParameterSpec(
        described.fqn,
        found,
        trainable=described.trainable,
        aliases=described.aliases,
        pattern=described.pattern,
        attributes=described.attributes,
    )
