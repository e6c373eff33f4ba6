"""One command, one paired table: ``python -m benchmarks.run [--quick]``. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import resume
from benchmarks.bench import Bench, Group, Row
from benchmarks.object_store import s3_server
from benchmarks.process import Measurement
from benchmarks.table import (
    load_table,
    read_table,
    resume_table,
    slice_table,
    targets,
    targets_table,
    write_table,
)

PACKAGES = ("deepspeed", "numpy", "tensorstore", "torch", "zarr")


def main() -> int:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.work.resolve(), "quick" if args.quick else "355m")
    with ExitStack() as stack:
        rows = bench.write_rows() + bench.read_rows()
        if args.object_store:
            rows += bench.object_store_rows(stack.enter_context(s3_server(bench.work / "s3")))
        groups = [
            replace(group, rows=[row for row in group.rows if _wanted(row, args.only)])
            for group in (Group("conversions and reads", rows), *resume.groups(bench))
        ]
        if any("store" in row.title for group in groups for row in group.rows):
            bench.make_store()
        results, loads = {}, {}
        for group in (group for group in groups if group.rows):
            group.prepare()
            found, loads[group.title] = _rounds(group.rows, args.rounds or (1 if args.quick else 3))
            group.release()
            results |= found
    bench.clean()
    print(_report(results, loads, bench.state_bytes))
    promised = (
        [] if args.quick else targets(results, bench.state_bytes)
    )  # they are about the large model
    if promised:
        print("", targets_table(promised), sep="\n")
    if args.json:
        document = {
            "machine": _machine(),
            "loads": loads,
            "state_bytes": bench.state_bytes,
            "rows": {title: [asdict(m) for m in rounds] for title, rounds in results.items()},
            "targets": [
                dict(zip(("target", "measured", "met"), item, strict=True)) for item in promised
            ],
        }
        args.json.write_text(json.dumps(document, indent=1))
    return 0 if all(ok for _, _, ok in promised) else 1


def _wanted(row: Row, only: Sequence[str] | None) -> bool:
    return not only or any(part in row.title for part in only)


def _rounds(rows: Sequence[Row], count: int) -> tuple[dict[str, list[Measurement]], list[float]]:
    """Every row once per round, in alternating order, so that no row always follows the same one."""
    results: dict[str, list[Measurement]] = {row.title: [] for row in rows}
    for row in rows:
        if row.warm_up:
            row.warm_up()
    loads = []
    for number in range(count):
        loads.append(os.getloadavg()[0])
        for row in rows if number % 2 == 0 else reversed(rows):
            measurement = row.run()
            results[row.title].append(measurement)
            print(f"round {number + 1}: {row.title}: {measurement.wall:.3f} s", file=sys.stderr)
    return results, loads


def _report(
    results: dict[str, list[Measurement]], loads: Mapping[str, Sequence[float]], state_bytes: int
) -> str:
    resumed = [t for t in results if any(t.startswith(f"{to.title}: ") for to in resume.LAYOUTS)]
    slices = [t for t in results if t.endswith(" slices")]
    reads = [t for t in results if t.startswith(("open", "store,"))]
    writes = [t for t in results if t not in {*slices, *reads, *resumed}]
    rounds = len(next(iter(loads.values()), ()))
    load = "; ".join(
        f"{title}: " + ", ".join(f"{value:.1f}" for value in values)
        for title, values in loads.items()
    )
    head = (
        f"{state_bytes / 1e9:.2f} GB of fp32 weights and moments; {rounds} rounds, "
        f"load average at the start of each: {load}; {os.cpu_count()} cores. "
        "Median (smallest-largest)."
    )
    lines = [head]
    lines += [write_table(results, writes, state_bytes)] if writes else []
    lines += [read_table(results, reads)] if reads else []
    lines += [slice_table(results, slices)] if slices else []
    lines += [resume_table(results, resumed), load_table(results, resumed)] if resumed else []
    return "\n\n".join(lines)


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cores": os.cpu_count(),
        "memory": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    return facts | {name: version(name) for name in PACKAGES}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("bench-data"),
        help="folder for inputs and outputs (25 GB)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a 53 MB model, one round: tries the harness"
    )
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="only rows whose title contains a TEXT"
    )
    parser.add_argument(
        "--object-store", action="store_true", help="also convert to a local S3 server"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
