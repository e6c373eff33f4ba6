"""Medians, ratios of paired rounds, and the Markdown tables made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.bench import BASE, MEMORY_LIMIT, OBJECT_STORE
from benchmarks.process import Measurement
from benchmarks.resume import COMMAND, DIRECT, OWN, TORCH, UNIVERSAL

__all__ = [
    "Results",
    "load_table",
    "read_table",
    "resume_table",
    "slice_table",
    "targets",
    "targets_table",
    "write_table",
]

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


def resume_table(results: Results, titles: Sequence[str]) -> str:
    """From the source to engines that hold it in another layout: every step, and the whole."""
    head = ["", "open s", "to the store s", "convert s", "DeepSpeed's load s", "all s"]
    head += ["/ copy 256 KiB", "/ ds_to_universal", "CPU s", "anonymous MB of convert"]
    lines = []
    for title in titles:
        rounds = results[title]
        steps = [m.extra.get("steps", {}) for m in rounds]
        if not title.endswith(BASE) and "convert" not in steps[0]:
            continue
        layout = title.partition(": ")[0]
        names = ("open", "store", "convert", "load")
        cells = [
            spread([s[n] for s in steps], 2 + (n == "open")) if n in steps[0] else "" for n in names
        ]
        lines.append(
            [
                title,
                *cells,
                spread([m.wall for m in rounds]),
                _optional(ratios(results, title, f"{layout}: {BASE}")),
                _optional(ratios(results, title, f"{layout}: {UNIVERSAL}")),
                spread([m.cpu for m in rounds]),
                spread([m.anonymous / 1e6 for m in rounds], 0),
            ]
        )
    return _markdown(head, lines)


def load_table(results: Results, titles: Sequence[str]) -> str:
    """Loads: those of DeepSpeed of whatever converter's files, and those of one rank by its own reads."""
    head = ["", "load s", "/ its own files", "/ torch.load", "held MB", "read / needed"]
    head += ["further memory MB"]
    lines = []
    for title in titles:
        rounds = results[title]
        if "increment" not in rounds[0].extra:
            continue
        layout = title.partition(": ")[0]
        walls = load_walls(results, title)
        native = "steps" in rounds[0].extra
        base = load_walls(results, f"{layout}: {OWN if native else TORCH}")
        over = (
            "" if base is None else spread([a / b for a, b in zip(walls or (), base, strict=True)])
        )
        extra = rounds[-1].extra
        read = "needed" in extra
        lines.append(
            [
                title,
                spread(walls or ()),
                over if native else "",
                "" if native else over,
                f"{extra['nbytes'] / 1e6:.0f}" if "nbytes" in extra else "",
                spread([amplification(m) for m in rounds], 3) if read else "",
                spread([m.extra["increment"] / 1e6 for m in rounds], 0),
            ]
        )
    return _markdown(head, lines)


def load_walls(results: Results, title: str) -> list[float] | None:
    """Seconds of a row's load, per round: of its last step where it has several."""
    if title not in results:
        return None
    return [m.extra.get("steps", {}).get("load", m.wall) for m in results[title]]


def amplification(measurement: Measurement) -> float:
    """Bytes read from storage per byte that the rank needs."""
    return float(measurement.extra["storage_read"] / measurement.extra["needed"])


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
    for title in results:
        promises += _resume_promises(results, title)
    limit = (MEMORY_LIMIT + 200e6) / 1e6
    for title in (t for t in results if OBJECT_STORE in t):
        peaks = [m.anonymous / 1e6 for m in results[title]]
        promises.append((f"{title}: anonymous MB", _worst(peaks), limit))
    return [
        (f"{text} <= {limit:g}", value, value <= limit)
        for text, value, limit in promises
        if value is not None
    ]


def _resume_promises(results: Results, title: str) -> list[tuple[str, float | None, float]]:
    """What is promised of a row of `benchmarks.resume`."""
    layout, _, row = title.partition(": ")
    if row == DIRECT:
        mine, own = (load_walls(results, f"{layout}: {name}") for name in (DIRECT, OWN))
        over = (
            None if mine is None or own is None else [a / b for a, b in zip(mine, own, strict=True)]
        )
        return [(f"{layout}: DeepSpeed's load of our files / of its own", _median(over), 1.15)]
    if row == COMMAND:
        return [
            (
                f"{title} and load / ds_to_universal and load",
                _median(ratios(results, title, f"{layout}: {UNIVERSAL}")),
                0.5,
            )
        ]
    if "storage_read" in results[title][0].extra:
        worst = _worst([amplification(m) for m in results[title]])
        return [(f"{title}: read / needed", worst, 1.05)]
    return []


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
