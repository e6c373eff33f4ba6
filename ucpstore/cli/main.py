"""``ucpstore``: the same verbs as the Python API, parsing and rendering only."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ucpstore import __version__, api
from ucpstore.cli.environment import environment
from ucpstore.cli.mappings import mapping_option, preset_descriptions, read_mapping
from ucpstore.cli.moving import copy, gc, steps
from ucpstore.cli.output import EXIT_FINDINGS, Output, options, side_option
from ucpstore.cli.patterns import patterns as patterns_commands
from ucpstore.cli.progress import Progress
from ucpstore.engine.sizes import format_bytes, parse_bytes
from ucpstore.errors import ParameterNotFoundError
from ucpstore.layout.parallel import Layout
from ucpstore.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucpstore.checkpoint import Checkpoint

__all__ = ["main"]


class _Group(click.Group):
    """Commands whose interruption has one exit code, also right before and after their work."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click itself would leave with 1, which means findings."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Output(
                as_json=False, quiet=False, verbose=0, color=True, storage_options={}
            ).interrupted()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ucpstore")
def main() -> None:
    """Open, convert and check distributed training checkpoints.

    URLs are local paths or s3://, gs://, memory:// addresses. Exit codes: 0 ok, 1 findings, 2 usage,
    3 source, pattern, layout or plan, 4 storage or workers, 5 integrity, 70 a bug, 130 interrupted (run
    again to continue), 141 nobody reads the output.
    """


for _command in (patterns_commands, copy, steps, gc):
    main.add_command(_command)

_tag = click.option("--tag", help="Checkpoint tag; by default the one that 'latest' names.")
_roots = click.option(
    "--source",
    "roots",
    multiple=True,
    metavar="URL",
    help="A further root: the rank files that another node wrote. May be repeated.",
)
_patterns = click.option(
    "--patterns",
    metavar="FILE|PRESET",
    help="How parameters lie on tensor-parallel ranks: a TOML or JSON file, or a preset.",
)


def _groups(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, int] | None:
    """``GLOB=GROUP`` pairs."""
    found = {}
    for text in texts:
        glob, separator, group = text.rpartition("=")
        if not (separator and glob and group.isascii() and group.isdigit()):
            raise click.BadParameter(f"{text!r} is not GLOB=GROUP", ctx=context, param=option)
        found[glob] = int(group)
    return found or None


_unfreeze = click.option(
    "--unfreeze",
    multiple=True,
    metavar="GLOB=GROUP",
    callback=_groups,
    help="Frozen parameters that the run will train, and the number of the parameter group that they join.",
)


def _selection(command: Any) -> Any:
    """Options that choose the target, parameters and states."""
    for option in (
        mapping_option("SOURCE"),
        _unfreeze,
        click.option(
            "--layout", metavar="NAME=N,...", help="Of the run that loads it: dp=2,zero_stage=3."
        ),
        click.option(
            "--to",
            type=click.Choice(["zarr", "deepspeed"]),
            default="zarr",
            show_default=True,
            help="What to write.",
        ),
        click.option(
            "--exclude", multiple=True, metavar="GLOB", help="Leave these parameters out."
        ),
        click.option("--only", multiple=True, metavar="GLOB", help="Only these parameters."),
        click.option("--state", "states", multiple=True, metavar="NAME", help="Only these states."),
        _patterns,
        _tag,
        _roots,
        click.option(
            "--format", "format_", default="auto", show_default=True, help="Format of SOURCE."
        ),
        side_option("dest"),
        side_option("source"),
    ):
        command = option(command)
    return command


def _open(
    url: str,
    output: Output,
    *,
    roots: Sequence[str],
    format_: str,
    mappings: Sequence[str],
    **which: Any,
) -> Checkpoint:
    checkpoint = api.open(
        [url, *roots],
        format=format_,
        mapping=read_mapping(mappings),
        storage_options=output.storage_options,
        **which,
    )
    for text in checkpoint.warnings:
        output.note(f"warning: {text}")
    return checkpoint


_format = click.option(
    "--format", "format_", default="auto", show_default=True, help="Format of URL."
)
_mapping = mapping_option("URL")


@main.command()
@click.argument("url")
@_format
@_tag
@_roots
@_patterns
@_mapping
@options
def inspect(
    url: str,
    *,
    roots: Sequence[str],
    format_: str,
    mappings: Sequence[str],
    output: Output,
    **which: Any,
) -> None:
    """Say what is at URL: format, layout, states, common state. Reads no tensor bytes."""
    checkpoint = api.open(
        [url, *roots],
        format=format_,
        mapping=read_mapping(mappings),
        storage_options=output.storage_options,
        **which,
    )
    info = checkpoint.info()
    if output.as_json:
        output.json(info)
        return
    output.data(f"url         {info['url']}")
    output.data(f"format      {info['format']}")
    output.data(
        "layout      " + ", ".join(f"{name}={value}" for name, value in info["layout"].items())
    )
    output.data(
        f"parameters  {info['parameters']} ({info['trainable']} trainable, {info['aliases']} aliases)"
        f" in {info['files']} files"
    )
    for name, state in info["states"].items():
        output.data(
            f"state       {printable(name)}: {state['tensors']} tensors, {state['elements']:,} elements,"
            f" {format_bytes(state['nbytes'])}, {'/'.join(state['dtypes'])}, {state['role']}"
        )
    output.data("common      " + ", ".join(info["common"]))
    for text in info["warnings"]:
        output.data(f"warning     {printable(text)}")


@main.command()
@click.argument("url")
@click.option(
    "--fqn", default="*", show_default=True, metavar="GLOB", help="Only matching parameters."
)
@click.option("--state", metavar="NAME", help="Only this state.")
@_format
@_tag
@_roots
@_patterns
@_mapping
@options
def ls(
    url: str, *, fqn: str, state: str | None, format_: str, output: Output, **which: Any
) -> None:
    """List parameters and states of URL, one line each."""
    checkpoint = _open(url, output, format_=format_, **which)
    rows = [
        (parameter, tensor)
        for parameter in checkpoint.values()
        if fnmatchcase(parameter.fqn, fqn)
        for tensor in parameter.values()
        if state in (None, tensor.name)
    ]
    if not rows:
        raise ParameterNotFoundError(
            f"{checkpoint.url} holds nothing that matches --fqn {fqn!r}"
            + (f" and --state {state!r}" if state else "")
            + f": it has {len(checkpoint)} parameters.",
            hint="List all with `ucpstore ls URL`.",
        )
    if output.as_json:
        output.json(
            [
                {
                    "fqn": parameter.fqn,
                    "state": tensor.name,
                    "role": str(tensor.role),
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype),
                    "nbytes": tensor.nbytes,
                    "pattern": parameter.pattern,
                    "aliases": list(parameter.aliases),
                    "digest": tensor.digest,
                }
                for parameter, tensor in rows
            ]
        )
        return
    output.table(
        ("FQN", "STATE", "SHAPE", "DTYPE", "BYTES", "PATTERN"),
        [
            (
                p.fqn,
                t.name,
                "x".join(map(str, t.shape)) or "0-d",
                str(t.dtype),
                format_bytes(t.nbytes),
                p.pattern,
            )
            for p, t in rows
        ],
    )


@main.command()
@click.argument("url")
@click.option(
    "--max-nodes",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Lines before the rest is only counted.",
)
@_format
@_tag
@_roots
@_patterns
@_mapping
@options
def tree(url: str, *, max_nodes: int, format_: str, output: Output, **which: Any) -> None:
    """Draw the parameters of URL as a tree of their names."""
    checkpoint = _open(url, output, format_=format_, **which)
    text = checkpoint.tree(max_nodes=max_nodes)
    if output.as_json:
        output.json({"url": checkpoint.url, "format": checkpoint.format, "tree": text.splitlines()})
    else:
        output.data(text)


def _plan_and_report(
    source: Sequence[str], dest: str, output: Output, request: dict[str, Any]
) -> None:
    plan = api.plan(source, dest, **request)
    if output.as_json:
        output.json(plan.to_json())
    else:
        output.data(plan.summary())


@main.command()
@click.argument("source")
@click.argument("dest")
@_selection
@options
def plan(source: str, dest: str, *, roots: Sequence[str], output: Output, **request: Any) -> None:
    """Say what converting SOURCE to DEST would read and write. Writes nothing."""
    arguments = _request(source, dest, output, request)
    _plan_and_report([source, *roots], dest, output, arguments)


def _request(source: str, dest: str, output: Output, request: dict[str, Any]) -> dict[str, Any]:
    """CLI options as arguments of `ucpstore.api.convert`."""
    source_options, dest_options = output.options_of(
        (source, request["source_options"]), (dest, request["dest_options"])
    )
    layout = request["layout"]
    chosen = {
        "to": request["to"],
        "layout": None if layout is None else Layout.parse(layout),
        "patterns": request["patterns"],
        "format": request["format_"],
        "tag": request["tag"],
        "mapping": read_mapping(request["mappings"]),
        "unfreeze": request["unfreeze"],
        "states": request["states"] or None,
        "only": request["only"] or None,
        "exclude": request["exclude"] or None,
    }
    return {
        **chosen,
        "source_options": source_options,
        "dest_options": dest_options,
    }


def _share(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    if text is None:
        return None
    index, separator, count = text.partition("/")
    if not (separator and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise click.BadParameter(f"{text!r} is not I/N with 0 <= I < N", ctx=context, param=option)
    return int(index), int(count)


@main.command()
@click.argument("source")
@click.argument("dest")
@_selection
@click.option("--dry-run", is_flag=True, help="Only print the plan.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Worker processes.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Tasks in flight per worker; by default one per core.",
)
@click.option(
    "--worker", "share", metavar="I/N", callback=_share, help="Do only part I (from 0) of N."
)
@click.option(
    "--node",
    metavar="I/N",
    callback=_share,
    help="Be node I (from 0) of N, each of which sees only its own rank files; run all at once.",
)
@click.option("--memory-limit", metavar="BYTES", help="For tasks in flight, such as 512MB or 2GiB.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Further attempts when storage fails.",
)
@options
def convert(
    source: str,
    dest: str,
    *,
    roots: Sequence[str],
    dry_run: bool,
    workers: int,
    threads: int | None,
    share: tuple[int, int] | None,
    node: tuple[int, int] | None,
    memory_limit: str | None,
    retries: int,
    output: Output,
    **request: Any,
) -> None:
    """Convert SOURCE into an atomic checkpoint at DEST.

    Interrupted or killed? The same command again continues where durable work ended.
    """
    arguments = _request(source, dest, output, request)
    if dry_run:
        _plan_and_report([source, *roots], dest, output, arguments)
        return
    with Progress(output) as progress:
        report = api.convert(
            [source, *roots],
            dest,
            **arguments,
            workers=workers,
            threads=threads,
            share=share,
            node=node,
            memory_limit=memory_limit,
            retries=retries,
            on_event=progress,
        )
    if output.as_json:
        output.json({"event": "report", **report.to_json()})
        return
    for text in report.warnings:
        output.note(f"warning: {text}")
    output.data(report.summary())


@main.command()
@click.argument("url")
@click.option(
    "--layout",
    required=True,
    metavar="NAME=N,...",
    help="Of the run that would load URL: dp=2,zero_stage=3.",
)
@click.option("--rank", type=click.IntRange(min=0), required=True, help="Global rank in that run.")
@click.option("--memory-limit", metavar="BYTES", help="For blocks in flight, such as 64MB.")
@click.option("--compare", is_flag=True, help="Read every replica and require equal bits.")
@_patterns
@_mapping
@_unfreeze
@_format
@_tag
@_roots
@options
def load(
    url: str,
    *,
    roots: Sequence[str],
    layout: str,
    rank: int,
    memory_limit: str | None,
    compare: bool,
    patterns: str | None,
    mappings: Sequence[str],
    unfreeze: dict[str, int] | None,
    format_: str,
    tag: str | None,
    output: Output,
) -> None:
    """Read what one rank would hold of URL in another layout, drop it, and say what that took."""
    state = api.load(
        [url, *roots],
        Layout.parse(layout),
        rank,
        patterns=patterns,
        mapping=read_mapping(mappings),
        unfreeze=unfreeze,
        format=format_,
        tag=tag,
        storage_options=output.storage_options,
    )
    for text in state.warnings:
        output.note(f"warning: {text}")
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    moved = state.load(memory_limit=limit, compare=compare)
    if output.as_json:
        output.json(
            {
                "url": url,
                "layout": state.layout.to_json(),
                "rank": rank,
                "coordinates": dict(zip(("pp", "dp", "tp"), state.coordinates, strict=True)),
                **moved.to_json(),
                "tensors": [tensor.to_json() for tensor in state.tensors],
            }
        )
        return
    pp, dp, tp = state.coordinates
    output.data(f"rank     {rank}: pipeline stage {pp}, ZeRO rank {dp}, tensor-parallel rank {tp}")
    output.data(f"holds    {moved.tensor_count} tensors of {len(state)} parameters")
    output.data(f"bytes    {format_bytes(moved.held_nbytes)} held")
    output.data(f"needed   {format_bytes(moved.needed_nbytes)} of the source")
    output.data(
        f"read     {format_bytes(moved.read_nbytes)} in {moved.requests} reads"
        f" ({moved.amplification:.2f}x of what is needed)"
    )


@main.command()
@click.argument("url")
@click.option(
    "--against", metavar="URL", help="Also compare with this checkpoint, element by element."
)
@_roots
@click.option("--quick", is_flag=True, help="Only list objects and compare sizes; read none.")
@_patterns
@mapping_option("the other checkpoint")
@side_option("against")
@options
def verify(
    url: str,
    *,
    roots: Sequence[str],
    against: str | None,
    against_options: dict[str, Any],
    quick: bool,
    patterns: str | None,
    mappings: Sequence[str],
    output: Output,
) -> None:
    """Read every byte of URL and check it: checksums, digests, lost objects, replicas.

    Exits with 1 if anything is found.
    """
    own, others = output.options_of((url, {}), (against, against_options))
    result = api.verify(
        [url, *roots],
        against=against,
        quick=quick,
        patterns=patterns,
        mapping=read_mapping(mappings),
        storage_options=own,
        against_options=others,
    )
    if output.as_json:
        output.json(result.to_json())
    else:
        output.data(result.summary())
    if result.findings:
        sys.exit(EXIT_FINDINGS)


@main.command()
@click.argument("left")
@click.argument("right")
@click.option("--all", "show_all", is_flag=True, help="List equal states too.")
@_patterns
@mapping_option("LEFT")
@side_option("left")
@side_option("right")
@options
def diff(
    left: str,
    right: str,
    *,
    left_options: dict[str, Any],
    right_options: dict[str, Any],
    show_all: bool,
    patterns: str | None,
    mappings: Sequence[str],
    output: Output,
) -> None:
    """Compare two checkpoints of any format, bit by bit. Exits with 1 if they differ."""
    left_options, right_options = output.options_of((left, left_options), (right, right_options))
    result = api.diff(
        left,
        right,
        patterns=patterns,
        mapping=read_mapping(mappings),
        left_options=left_options,
        right_options=right_options,
    )
    if output.as_json:
        output.json(result.to_json())
    else:
        output.data(result.summary(show_all=show_all))
    if not result.equal:
        sys.exit(EXIT_FINDINGS)


@main.command()
@click.argument("mappings", nargs=-1, metavar="[MAPPING]...")
@click.option("--inverse", is_flag=True, help="The mapping that undoes it.")
@options
def mapping(mappings: Sequence[str], *, inverse: bool, output: Output) -> None:
    """Print a mapping in its normal form (JSON), or list the presets.

    MAPPING is a file, or preset:NAME,NAME=N,... Several are applied one after the other.
    """
    found = read_mapping(mappings)
    if found is not None:
        output.json((found.inverse() if inverse else found).to_json())
        return
    presets = preset_descriptions()
    if output.as_json:
        output.json({"presets": presets})
        return
    for name, about in presets.items():
        output.data(f"{name}\n    {about}")


@main.command()
@click.argument("dest")
@options
def abandon(dest: str, *, output: Output) -> None:
    """Free the claim of a conversion to DEST that will never be finished."""
    freed = api.abandon(dest, storage_options=output.storage_options)
    if output.as_json:
        output.json({"url": dest, "abandoned": freed})
    else:
        output.data(f"{dest}: " + (f"abandoned {freed}" if freed else "no open claim"))


@main.command()
@options
def env(*, output: Output) -> None:
    """Say what is installed here and what the machine offers, for bug reports."""
    facts = environment()
    if output.as_json:
        output.json(facts)
        return
    for name, value in facts.items():
        output.data(f"{name:<14} {value}")
