"""Medians, ratios of paired rounds, and the Markdown tables made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.bench import BASE, MEMORY_LIMIT, OBJECT_STORE
from benchmarks.process import Measurement

__all__ = ["Results", "read_table", "slice_table", "targets", "targets_table", "write_table"]

Results = Mapping[str, Sequence[Measurement]]
"""Title of a row -> its measurement in every round."""


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (smallest-largest)``, or the one value."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(results: Results, title: str, base: str) -> list[float] | None:
    """Wall time of a row over that of the base in the same round."""
    if title not in results or base not in results:
        return None
    return [a.wall / b.wall for a, b in zip(results[title], results[base], strict=True)]


def write_table(results: Results, titles: Sequence[str], state_bytes: int) -> str:
    """Copies and conversions: cost, and bytes as multiples of the states' bytes."""
    head = ["", "wall s", "/ copy 256 KiB", "CPU s", "anonymous MB"]
    head += ["read / state", "written / state", "files"]
    lines = []
    for title in titles:
        rounds = results[title]
        size = rounds[-1].extra.get("nbytes", state_bytes)
        same = abs(size / state_bytes - 1) < 0.01  # padding and step counters aside
        written = "" if OBJECT_STORE in title else spread([m.written / size for m in rounds], 3)
        lines.append(
            [
                title,
                spread([m.wall for m in rounds]),
                _optional(ratios(results, title, BASE)) if same else "",
                spread([m.cpu for m in rounds]),
                spread([m.anonymous / 1e6 for m in rounds], 0),
                spread([m.read / size for m in rounds], 3),
                written,  # the kernel counts no bytes that are sent
                str(rounds[-1].files or ""),
            ]
        )
    return _markdown(head, lines)


def read_table(results: Results, titles: Sequence[str]) -> str:
    """Opening, and reading whole stores."""
    base = "store, preadv, reused buffer"
    head = ["", "wall s", "/ preadv", "CPU s", "anonymous MB", "MB", "GB/s"]
    lines = []
    for title in titles:
        rounds = results[title]
        nbytes = rounds[-1].extra.get("nbytes")
        lines.append(
            [
                title,
                spread([m.wall for m in rounds], 3),
                _optional(ratios(results, title, base)) if nbytes else "",
                spread([m.cpu for m in rounds]),
                spread([m.anonymous / 1e6 for m in rounds], 0),
                f"{nbytes / 1e6:.0f}" if nbytes else "",
                spread([nbytes / m.wall / 1e9 for m in rounds]) if nbytes else "",
            ]
        )
    return _markdown(head, lines)


def slice_table(results: Results, titles: Sequence[str]) -> str:
    """Slices of the largest matrix: time, and bytes read over bytes wanted."""
    head = ["", "slice", "MB", "ms", "read / slice"]
    lines = []
    for title in titles:
        for name in results[title][0].extra["slices"]:
            costs = [m.extra["slices"][name] for m in results[title]]
            nbytes = costs[0]["nbytes"]
            lines.append(
                [
                    title.removesuffix(" slices"),
                    name,
                    f"{nbytes / 1e6:.3f}",
                    spread([cost["wall"] * 1e3 for cost in costs], 1),
                    spread([cost["read"] / nbytes for cost in costs], 2),
                ]
            )
    return _markdown(head, lines)


def targets(results: Results, state_bytes: int) -> list[tuple[str, float, bool]]:
    """What the project promises of its own rows: wording, measured value, whether it holds.

    Times are judged by the median over the rounds, memory and bytes by the worst round.
    """
    command, universal = "ucpstore convert (command)", "ds_to_universal (command)"
    full, preadv = "store, all states, reused buffer", "store, preadv, reused buffer"
    opened = results.get("open the source", ())
    promises = [
        ("convert() / copy in 256 KiB blocks", _median(ratios(results, "convert()", BASE)), 1.25),
        (f"{command} / ds_to_universal", _median(ratios(results, command, universal)), 0.2),
        ("open the source, s", _median([m.wall for m in opened]), 0.1),
        ("open loads torch (0: no)", _worst([float(m.extra["torch"]) for m in opened]), 0.0),
        ("full read of the store / preadv", _median(ratios(results, full, preadv)), 2.5),
    ]
    for title in ("convert()", command):
        rounds = results.get(title, ())
        promises += [
            (f"{title}: written / state", _worst([m.written / state_bytes for m in rounds]), 1.03),
            (f"{title}: read / state", _worst([m.read / state_bytes for m in rounds]), 1.05),
            (f"{title}: anonymous MB", _worst([m.anonymous / 1e6 for m in rounds]), 300.0),
        ]
    limit = (MEMORY_LIMIT + 200e6) / 1e6
    for title in (t for t in results if OBJECT_STORE in t):
        peaks = [m.anonymous / 1e6 for m in results[title]]
        promises.append((f"{title}: anonymous MB", _worst(peaks), limit))
    return [
        (f"{text} <= {limit:g}", value, value <= limit)
        for text, value, limit in promises
        if value is not None
    ]


def _median(values: Sequence[float] | None) -> float | None:
    return median(values) if values else None


def _worst(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def targets_table(found: Sequence[tuple[str, float, bool]]) -> str:
    """The promises as a table."""
    lines = [[text, f"{value:.3f}", "met" if ok else "MISSED"] for text, value, ok in found]
    return _markdown(["target", "measured", ""], lines)


def _optional(values: Sequence[float] | None) -> str:
    return spread(values) if values else ""


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---" if index == 0 else "---:" for index in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
