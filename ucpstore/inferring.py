"""How parameters lie on ranks: inferred, explained and checked, of a checkpoint at a URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ucpstore.contracts import Source
from ucpstore.io import open_roots
from ucpstore.layout.rules import Patterns
from ucpstore.opening import Rules, Urls, format_of

if TYPE_CHECKING:
    from ucpstore.inspect.infer import Explanation, Inference, PatternCheck

__all__ = ["check_patterns", "explain_patterns", "infer_patterns"]


def _open_ranks(
    url: Urls,
    patterns: Rules | None,
    format_: str,
    tag: str | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[list[Source], Patterns]:
    """What every tensor-parallel rank holds, and the rules in force: the given ones, then the checkpoint's."""
    files = open_roots(url, storage_options)
    opener = partial(format_of(files, format_).open, files, tag=tag, patterns=Patterns.of(patterns))
    first = opener(rank=0)
    degree = first.parallelism.get("tp", 1)
    sources = [first, *(opener(rank=rank) for rank in range(1, degree))]
    recorded = first.common.document.get("patterns")
    return sources, Patterns() if recorded is None else Patterns.from_json(recorded)


def infer_patterns(
    url: Urls,
    *,
    patterns: Rules | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Inference:
    """Infer how parameters lie on tensor-parallel ranks, where the checkpoint does not say it.

    Shapes, names, the sizes of a layer's matrices, presets and contents (read until the ranks differ) are the
    evidence. What they leave open is not decided: it is among the result's ``questions``.

    Parameters
    ----------
    url, format, tag, storage_options
        As for `open`.
    patterns : Patterns, path or str, optional
        Rules that are known already, beside those that the checkpoint records.

    Returns
    -------
    Inference
        ``patterns`` for `open` and `convert`; ``toml()`` is the text to edit.
    """
    from ucpstore.inspect.infer import infer_sources

    sources, known = _open_ranks(url, patterns, format, tag, storage_options)
    return infer_sources(sources, known=known)


def explain_patterns(
    url: Urls,
    names: Sequence[str] = (),
    *,
    patterns: Rules | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Explanation:
    """Say why parameters are taken to lie on tensor-parallel ranks as they do.

    Parameters
    ----------
    url, format, tag, storage_options
        As for `open`.
    names : sequence of str
        Fully qualified names; by default all.
    patterns : Patterns, path or str, optional
        Rules that count before those that the checkpoint records.

    Returns
    -------
    Explanation
        Per parameter the rule in force, where it comes from, shapes, evidence and how sure it is.

    Raises
    ------
    ParameterNotFoundError
    """
    from ucpstore.inspect.infer import explain_sources

    sources, known = _open_ranks(url, patterns, format, tag, storage_options)
    return explain_sources(sources, names, known=known)


def check_patterns(
    url: Urls,
    patterns: Rules | None = None,
    *,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PatternCheck:
    """Try rules on a checkpoint: names, shapes, and copies bit by bit. All findings are collected.

    Parameters
    ----------
    url, format, tag, storage_options
        As for `open`.
    patterns : Patterns, path or str, optional
        These rules and no others; by default those that the checkpoint records.

    Returns
    -------
    PatternCheck
    """
    from ucpstore.inspect.infer import check_sources

    sources, recorded = _open_ranks(url, None, format, tag, storage_options)
    return check_sources(sources, recorded if patterns is None else Patterns.of(patterns))
