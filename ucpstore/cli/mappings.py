"""The option ``--mapping``: files and presets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from ucpstore.errors import Kind, PatternError

if TYPE_CHECKING:
    from ucpstore.mapping import Mapping

__all__ = ["mapping_option", "preset_descriptions", "read_mapping"]

_Command = TypeVar("_Command", bound=Callable[..., object])
_PRESET = "preset:"


def mapping_option(what: str) -> Callable[[_Command], _Command]:
    """``--mapping``, which may be given several times."""
    return click.option(
        "--mapping",
        "mappings",
        multiple=True,
        metavar="FILE|preset:NAME,...",
        help=f"See {what} through a mapping of names and shapes; see `ucpstore mapping`.",
    )


def preset_descriptions() -> dict[str, str]:
    """Names of the presets, and what each is for."""
    from ucpstore.mapping import Mapping

    return Mapping.presets()


def read_mapping(texts: Sequence[str]) -> Mapping | None:
    """The mappings that the option names, one after the other; None where there are none.

    Raises
    ------
    PatternError, FormatVersionError
        A file is no mapping document, or there is no such preset.
    """
    from ucpstore.mapping import Mapping

    found = [_read(text) for text in texts]
    return Mapping(()).then(*found) if found else None


def _read(text: str) -> Mapping:
    from ucpstore.mapping import Mapping

    if not text.startswith(_PRESET):
        return Mapping.load(text)
    name, *settings = text.removeprefix(_PRESET).split(",")
    parameters = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not (separator and key and value.isascii() and value.isdigit()):
            raise PatternError(
                f"{text}: found {setting!r}, expected NAME=N.",
                hint="Such as preset:NAME,layers=24,heads=16.",
                kind=Kind.MALFORMED,
            )
        parameters[key] = int(value)
    return Mapping.preset(name, **parameters)
