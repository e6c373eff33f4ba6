"""``ucpstore copy``, ``steps`` and ``gc``: committed checkpoints after their conversion."""

from __future__ import annotations

from typing import Any

import click

from ucpstore import moving
from ucpstore.cli.output import Output, options, side_option
from ucpstore.cli.progress import Progress

__all__ = ["copy", "gc", "steps"]


@click.command()
@click.argument("source")
@click.argument("dest")
@click.option("--tag", help="Step of a run: its number or its folder; by default the latest.")
@click.option("--max-rate", metavar="BYTES", help="Bytes a second on average, such as 100MB.")
@click.option(
    "--server-side/--no-server-side",
    default=True,
    show_default=True,
    help="Let a server that holds both sides copy.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Read back what a server copied by itself.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes."
)
@click.option("--threads", type=click.IntRange(min=1), help="Objects in flight per worker.")
@click.option("--memory-limit", metavar="BYTES", help="For objects in flight, such as 2GiB.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Further attempts when storage fails.",
)
@side_option("source")
@side_option("dest")
@options
def copy(
    source: str,
    dest: str,
    *,
    source_options: dict[str, Any],
    dest_options: dict[str, Any],
    output: Output,
    **request: Any,
) -> None:
    """Copy a committed checkpoint to DEST, checked on the way; the same bytes, the root document last.

    SOURCE may be a run. Interrupted or killed? The same command again continues.
    """
    of_source, of_dest = output.options_of((source, source_options), (dest, dest_options))
    with Progress(output, "copying") as progress:
        report = moving.copy(
            source,
            dest,
            source_options=of_source,
            dest_options=of_dest,
            on_event=progress,
            **request,
        )
    if output.as_json:
        output.json({"event": "report", **report.to_json()})
        return
    for text in report.warnings:
        output.note(f"warning: {text}")
    output.data(report.summary())


@click.command()
@click.argument("run")
@click.option("--use", metavar="FOLDER", help="Make this attempt what the run has for its step.")
@options
def steps(run: str, *, use: str | None, output: Output) -> None:
    """List the checkpoints of RUN; the one that opens by default has a star."""
    if use is not None:
        moving.use_attempt(run, use, storage_options=output.storage_options)
    found = moving.steps(run, storage_options=output.storage_options)
    if output.as_json:
        output.json(found.to_json())
        return
    header = ("NAME", "STEP", "STATUS", "OBJECTS", "BYTES", "FORMAT", "PLAN")
    output.table(header, found.rows())


@click.command()
@click.argument("run")
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep this many of the latest steps.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep multiples of this, too.")
@click.option(
    "--grace",
    default="1d",
    show_default=True,
    metavar="TIME",
    help="Spare attempts and strays younger than this: 30m, 12h, 1d.",
)
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would go.")
@options
def gc(run: str, *, yes: bool, output: Output, **policy: Any) -> None:
    """Delete old steps, dead attempts and stray objects of RUN.

    Without --keep-last and --keep-every all committed steps stay. Interrupted? Run it again.
    """
    found = moving.gc(run, dry_run=not yes, storage_options=output.storage_options, **policy)
    if output.as_json:
        output.json(found.to_json())
        return
    output.data(found.summary())
    if found.dry_run and found.deletions:
        output.note("nothing was deleted: run it again with --yes")
