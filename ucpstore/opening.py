"""How a URL becomes a `Source`: formats are told apart, runs looked through, mappings put in front."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ucpstore.contracts import Format, Source
from ucpstore.errors import (
    CheckpointNotFoundError,
    NotFoundError,
    PlanError,
    UnrecognizedSourceError,
)
from ucpstore.io import Url
from ucpstore.io.base import Files
from ucpstore.io.union import UnionFiles
from ucpstore.layout.rules import Patterns

if TYPE_CHECKING:
    from ucpstore.mapping import Mapping as NameMapping

__all__ = [
    "Rules",
    "Urls",
    "View",
    "find_checkpoint",
    "format_of",
    "formats",
    "make_view",
    "open_source",
]

Urls = Url | Sequence[Url]
"""One root, or several among which the files of one checkpoint are spread."""
Rules = Patterns | str | os.PathLike[str]
"""Patterns, the path of a TOML or JSON file, or the name of a preset."""


def formats() -> dict[str, Format]:
    """Installed framework formats by name (entry-point group ``ucpstore.formats``)."""
    found = {point.name: point.load() for point in entry_points(group="ucpstore.formats")}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class View:
    """How a source is to be read: rules for its ranks, and the names and shapes to show it with."""

    patterns: Patterns = field(default_factory=Patterns)
    mapping: NameMapping | None = None
    unfreeze: tuple[tuple[str, int], ...] = ()


def make_view(
    patterns: Rules | None, mapping: NameMapping | None, unfreeze: Mapping[str, int] | None
) -> View:
    from ucpstore.unfrozen import checked_unfreeze

    return View(Patterns.of(patterns), _checked(mapping), checked_unfreeze(unfreeze))


def open_source(files: Files, name: str, tag: str | None, view: View) -> Source:
    """Open, and look through the mapping."""
    if name == "auto":
        files, tag, format_ = _in_run(files, tag)
    else:
        format_ = format_of(files, name)
    source = format_.open(files, tag=tag, patterns=view.patterns)
    if view.mapping is not None:
        from ucpstore.mapped import map_source

        source = map_source(source, view.mapping)
    if view.unfreeze:
        from ucpstore.unfrozen import UnfrozenSource

        source = UnfrozenSource(source, view.unfreeze)
    return source


def _in_run(files: Files, tag: str | None) -> tuple[Files, str | None, Format]:
    """The format at the files; in a run of our own checkpoints, that of the step ``tag`` or the latest."""
    try:
        return files, tag, format_of(files, "auto")
    except UnrecognizedSourceError:
        from ucpstore.runs.listing import find_step, open_folder

        folder = find_step(files, tag)
        if folder is None:
            raise
        inner = open_folder(files, folder)
        return inner, None, format_of(inner, "auto")


def find_checkpoint(files: Files, *, tag: str | None = None) -> Files:
    """Where a checkpoint of our own lies: at the files, or in the run that they are."""
    from ucpstore.runs.listing import find_step, open_folder
    from ucpstore.store.source import StoreFormat

    if tag is None and StoreFormat().detect(files).matches:
        return files
    folder = find_step(files, tag)
    if folder is not None:
        return open_folder(files, folder)
    if tag is not None:
        raise CheckpointNotFoundError(
            f"{files.url} is not a run of ucpstore checkpoints: found tag {tag!r}, expected none.",
            url=files.url,
        )
    return files


def _checked(mapping: NameMapping | None) -> NameMapping | None:
    if mapping is None:
        return None
    from ucpstore.mapping import Mapping as NameMapping

    if not isinstance(mapping, NameMapping):
        raise PlanError(
            f"cannot map with {mapping!r:.80}: found {type(mapping).__name__}, expected a ucpstore.Mapping.",
            hint="Read a file with ucpstore.Mapping.load.",
        )
    return mapping


def format_of(files: Files, name: str) -> Format:
    """The format of this name, or the first that recognises the files (our own first)."""
    from ucpstore.store.source import StoreFormat

    own = StoreFormat()
    known: dict[str, Format] = {own.name: own, **formats()}
    if isinstance(files, UnionFiles):
        del known[own.name]  # a store is what lies under its root document
    if name != "auto":
        if name not in known:
            raise NotFoundError(
                f"no format {name!r}: installed are {', '.join(known)}.", format=name
            )
        return known[name]
    seen = []
    for format_ in known.values():
        detection = format_.detect(files)
        if detection.matches:
            return format_
        seen.append(f"{format_.name}: {detection.evidence}")
    if files.is_local and os.path.isfile(files.url):
        raise UnrecognizedSourceError(
            f"{files.url} is a file, expected the folder of a checkpoint.",
            hint="Give the folder that the framework's save wrote.",
            url=files.url,
        )
    if not files.list(recursive=False) and not files.folders():
        raise CheckpointNotFoundError(f"nothing is at {files.url}.", url=files.url)
    raise UnrecognizedSourceError(
        f"{files.url} is no checkpoint that is known here: {'; '.join(seen)}.",
        hint="Give the folder that the framework's save wrote (DeepSpeed: the one with 'latest'), or format=.",
        url=files.url,
    )
