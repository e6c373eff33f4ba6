"""The public functions. This is where formats, store and engine are wired together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from ucpstore.checkpoint import Checkpoint
from ucpstore.claims import COMMIT
from ucpstore.engine.plan import Plan
from ucpstore.engine.run import Report, Workers, nothing_to_do, run
from ucpstore.engine.sizes import parse_bytes
from ucpstore.engine.worker import Settings
from ucpstore.errors import (
    PlanError,
    listing,
)
from ucpstore.events import Listener
from ucpstore.io import Url, open_files, open_roots
from ucpstore.layout.parallel import Layout
from ucpstore.layout.rules import Patterns
from ucpstore.opening import Rules, Urls, formats, make_view, open_source
from ucpstore.request import SAME_LAYOUT, Request, open_job, require_objects

if TYPE_CHECKING:
    from ucpstore.inspect.diff import Diff
    from ucpstore.inspect.verify import Verification
    from ucpstore.mapping import Mapping as NameMapping
    from ucpstore.parts.held import Held
    from ucpstore.rankstate import Into, RankState

__all__ = [
    "abandon",
    "convert",
    "diff",
    "formats",
    "load",
    "open",
    "plan",
    "save_rank",
    "verify",
]

DEFAULT_MEMORY_LIMIT = 2 << 30
"""Bytes that tasks in flight may need together, where the caller gives no limit."""


def open(  # noqa: A001
    url: Urls,
    *,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    step: int | None = None,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format as one lazy mapping. Reads metadata only.

    Parameters
    ----------
    url : str or path, or several
        Folder or prefix: a path, ``s3://``, ``gs://`` or ``memory://``. Several are the roots that the nodes
        of a run wrote to: together they hold one checkpoint, and a file that lies in more than one must be
        the same there.
    format : str
        ``auto`` detects; ``ucpstore`` is our own store; else the name of an installed format.
    tag : str, optional
        Which checkpoint of a folder that holds several; by default the one that it calls the latest, and of a
        run of our own checkpoints the last committed step.
    step : int, optional
        The same by number, in a run of our own checkpoints.
    patterns : Patterns, path or str, optional
        How parameters lie on tensor-parallel ranks, where the checkpoint does not say it or says it wrongly:
        rules, a TOML or JSON file of them, or the name of a preset (`Patterns.presets`).
    mapping : ucpstore.Mapping, optional
        Show it under other names, with parameters fused, split or permuted.
    storage_options : mapping, optional
        In fsspec's words.

    Returns
    -------
    Checkpoint
        ``fqn -> state -> LazyTensor``.

    Raises
    ------
    CheckpointNotFoundError, UnrecognizedSourceError, IncompleteSourceError, CorruptSourceError
    UnsafePickleError
        A pickle asks for something that only running its code could give.
    UncommittedError
        A conversion into this URL is not finished.
    PatternError
        No rule says how a parameter lies on tensor-parallel ranks, or it does not fit; or the mapping does not.

    Examples
    --------
    >>> checkpoint = ucpstore.open("run/checkpoints")                    # doctest: +SKIP
    >>> checkpoint["model.norm.weight"].fp32[:4]                         # doctest: +SKIP
    """
    files = open_roots(url, storage_options)
    view = make_view(patterns, mapping, None)
    if step is not None:
        if tag is not None:
            raise PlanError(f"cannot open {files.url}: give step= or tag=, not both.")
        tag = str(step)
    return Checkpoint(open_source(files, format, tag, view))


def plan(
    source: Urls,
    dest: Url,
    *,
    to: str = "zarr",
    layout: Layout | None = None,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    unfreeze: Mapping[str, int] | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    states: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Say what `convert` with the same arguments would do. Writes nothing.

    Returns
    -------
    Plan
        ``summary()`` for people, ``to_json()`` for programs.
    """
    request = Request.of(
        source,
        dest,
        to=to,
        layout=layout,
        patterns=patterns,
        mapping=mapping,
        unfreeze=unfreeze,
        format=format,
        tag=tag,
        states=states,
        only=only,
        exclude=exclude,
        source_options=source_options,
        dest_options=dest_options,
    )
    return request.open(ranks=True)[0]


def convert(
    source: Urls,
    dest: Url,
    *,
    to: str = "zarr",
    layout: Layout | None = None,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    unfreeze: Mapping[str, int] | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    states: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    threads: int | None = None,
    share: tuple[int, int] | None = None,
    node: tuple[int, int] | None = None,
    timeout: float = 1800.0,
    memory_limit: float | str | None = None,
    retries: int = 4,
    source_options: Mapping[str, Any] | None = None,
    dest_options: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
) -> Report:
    """Convert a checkpoint into atomic checkpoints: one chunked Zarr array per parameter and state.

    One pass, no temporary copy, no whole tensor in memory. Nothing is visible at ``dest`` before
    everything is there. After a crash or an interruption the same call continues where durable work
    ended; racing calls with the same arguments co-operate.

    Parameters
    ----------
    source : str or path, or several
        URL or the roots of a run's nodes, as for `open`.
    dest : str or path
    to : str
        ``zarr``: our own store. ``deepspeed``: a native checkpoint that unmodified DeepSpeed loads.
        Either way ``dest`` holds one checkpoint: those of a run are neither added to nor replaced.
    layout : Layout, optional
        Of the run that will load a native checkpoint. Where the source has it already, nothing is
        written, and the report's ``url`` is the source.
    patterns, format, tag
        As for `open`.
    mapping : ucpstore.Mapping, optional
        Names and shapes of the target, where they are not the source's. `states` are the source's, `only` and
        `exclude` look at the target's names.
    unfreeze : mapping of str to int, optional
        The run that loads a native checkpoint trains parameters that the source's did not: globs over their names
        (in the target), with the number of the parameter group in ``common["param_groups"]`` that each joins, such as
        ``{"model.layers.0.*": 0}``. They get the group's hyper-parameters, their weight as the master weight,
        zeros for the optimizer's states, and the group's step, as DeepSpeed keeps one for a flat buffer.
        Without this, DeepSpeed finds another number of elements than its optimizer's and refuses to load.
    states : sequence of str, optional
        Only these states; by default all that cannot be made again from others (16-bit copies of
        master weights are left out).
    only, exclude : sequence of str, optional
        Globs over fully qualified names.
    executor : concurrent.futures.Executor, optional
        Where batches of tasks run. By default here or, with ``workers`` above 1, on that many processes.
    workers, threads : int, optional
        Batches in flight (by default 1, or as many as the executor says that it has workers), and tasks
        in flight inside each (the number of cores by default).
    share : (int, int), optional
        Do only part ``index`` of ``count``; other processes do the rest, and whoever finds everything
        done commits.
    node : (int, int), optional
        The rank files lie on the disks of the nodes that wrote them: this process is node ``index`` of ``count``,
        and ``source`` is what it sees of them. All nodes run at once; what they need of each other's files
        goes through ``dest``.
    timeout : float, seconds
        With ``node``: how long to wait for other nodes at any one step.
    memory_limit : number or str, optional, bytes
        What tasks in flight may need together, such as ``"512MB"``; 2 GiB by default.
    retries : int
        Further attempts of a task whose storage fails in a way that may pass.
    source_options, dest_options : mapping, optional
        Storage options of the two sides, in fsspec's words.
    on_event : callable, optional
        Receives every `ucpstore.events.Event`.

    Returns
    -------
    Report

    Raises
    ------
    AlreadyExistsError
        ``dest`` holds, or is claimed for, something else.
    PlanError
        Selection, memory limit or free space do not allow it; nothing was written.
    PatternError
        The mapping leaves names over, takes some twice, or does not fit; nothing was written.
    IntegrityError
        Replicas differ, or the source changed meanwhile.
    WorkerError
        A worker died or could not be started.
    StorageError
    """
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else parse_bytes(memory_limit)
    chosen = Workers(
        executor=executor, workers=workers, threads=threads, share=share, memory_limit=limit
    )
    request = Request.of(
        source,
        dest,
        to=to,
        layout=layout,
        patterns=patterns,
        mapping=mapping,
        unfreeze=unfreeze,
        format=format,
        tag=tag,
        states=states,
        only=only,
        exclude=exclude,
        source_options=source_options,
        dest_options=dest_options,
    )
    settings = Settings(threads=1, retries=retries)
    if node is not None:
        return _convert_node(
            request, node, timeout=timeout, workers=chosen, settings=settings, emit=on_event
        )
    found, opened, target = request.open()
    if SAME_LAYOUT in found.warnings:
        return nothing_to_do(opened, found)
    require_objects(opened)
    return run(
        (opened, target),
        found,
        workers=chosen,
        opener=partial(open_job, request),
        settings=settings,
        emit=on_event,
    )


def _convert_node(
    request: Request,
    node: tuple[int, int],
    *,
    timeout: float,
    workers: Workers,
    settings: Settings,
    emit: Listener | None,
) -> Report:
    """Convert what this node sees, together with the other nodes."""
    from ucpstore.formats.deepspeed.reader import DeepSpeedFormat
    from ucpstore.parts.nodes import meet
    from ucpstore.parts.work import divide, run_parts

    refused = {
        "to='deepspeed'": request.layout is not None,
        "a mapping": request.view.mapping is not None,
        f"format={request.format!r}": request.format not in ("auto", DeepSpeedFormat.name),
        "workers, share or an executor": (workers.workers, workers.share, workers.executor)
        not in ((None, None, None), (1, None, None)),
    }
    found = [name for name, asked in refused.items() if asked]
    if found:
        raise PlanError(
            f"cannot convert node by node with {listing(found)}: expected DeepSpeed's rank files, a Zarr target and"
            " threads only.",
            hint="Convert from a place that sees the roots of all nodes, or convert the store again.",
        )
    dest = open_files(request.dest, request.dest_options)
    own = open_roots(request.source, request.source_options)
    nodes = meet(own, dest, node=node, tag=request.tag, timeout=timeout)
    source = DeepSpeedFormat().open(nodes.files, tag=request.tag, patterns=request.view.patterns)
    plan_, _, target = request.open_zarr(source, dest)
    rank, count = node
    return run_parts(
        (source, target),
        plan_,
        divide(source, target, nodes.holders, rank=rank, world=count),
        exchange=nodes.exchange,
        files=nodes.files,
        workers=workers,
        settings=settings,
        wait=False,
        emit=emit,
    )


def load(
    url: Urls,
    layout: Layout,
    rank: int,
    *,
    into: Into | None = None,
    memory_limit: float | str | None = None,
    compare: bool = False,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    unfreeze: Mapping[str, int] | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> RankState:
    """What one rank of a run with another layout holds of a checkpoint, read by that rank alone.

    Opens and lays out from metadata only. Tensors are read when asked for, or all at once into the
    caller's own: parameter after parameter, each byte range once.

    Parameters
    ----------
    url : str or path
        A checkpoint of any format, as for `open`.
    layout : Layout
        Of the run that loads.
    rank : int
        Global rank in that run; see `Layout.coordinates`.
    into : mapping of str to mapping of str to array, optional
        Parameter -> state -> C-contiguous numpy array, or torch tensor on any device, to read into now.
    memory_limit : number or str, optional, bytes
        What reading into ``into`` may need besides it; 2 GiB by default.
    compare : bool
        Read every replica in the source and require that they are bit-equal.
    patterns : Patterns, path or str, optional
        As for `open`; in both layouts they come before what the checkpoint says itself.
    unfreeze : mapping of str to int, optional
        As for `convert`.
    mapping, format, tag, storage_options
        As for `open`.

    Returns
    -------
    RankState
        ``fqn -> state -> LocalTensor``: the model's local weights (``weight``) and buffers, and the
        optimizer's master weights and states, as flat ranges from ZeRO stage 1 on.

    Raises
    ------
    PlanError
        The layout is none that the checkpoint can have, or there is no such rank.
    LayoutError
        ``into`` does not fit; all differences are reported at once.

    Examples
    --------
    >>> state = ucpstore.load("run/ckpt", Layout(dp=2, zero_stage=3), 1)   # doctest: +SKIP
    >>> state["layers.0.mlp.weight"]["adam_m"].read()                      # doctest: +SKIP
    """
    from ucpstore.formats.deepspeed.holdings import holdings
    from ucpstore.formats.deepspeed.recipe import make_recipe
    from ucpstore.rankstate import RankState

    view = make_view(patterns, mapping, unfreeze)
    source = open_source(open_roots(url, storage_options), format, tag, view)
    recipe = make_recipe(source, layout, view.patterns)
    state = RankState(
        source,
        holdings(recipe, rank),
        layout=recipe.layout,
        rank=rank,
        warnings=[*source.warnings, *recipe.warnings],
    )
    if into is not None:
        limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else parse_bytes(memory_limit)
        state.load(into, memory_limit=limit, compare=compare)
    return state


def save_rank(
    url: Url,
    parts: Sequence[Held],
    *,
    rank: int,
    world: int,
    common: Mapping[str, Any] | None = None,
    parallelism: Mapping[str, Any] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    order: Sequence[str] | None = None,
    threads: int | None = None,
    memory_limit: float | str | None = None,
    retries: int = 4,
    timeout: float = 1800.0,
    wait: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    on_event: Listener | None = None,
) -> Report:
    """Save what this rank of a running job holds; all ranks call it, and together write one store.

    The ranks talk through ``url`` alone. Each writes objects of which it holds most, straight from memory;
    what it holds of others' objects it stages for them. The checkpoint becomes visible at once, when every object
    is there. After a failure nothing is: the next attempt takes over what the dead one had claimed.

    Parameters
    ----------
    url : str or path
        Where nothing is yet; every save of a run has a folder of its own.
    parts : sequence of Held
        What this rank holds. Every element of every state must be held by somebody. Replicas may be given by
        all that hold them: they are compared, and their writing is divided.
    rank, world : int
        Which of how many callers this is.
    common : mapping, optional
        The common state, JSON values (`ucpstore.contracts.CommonState`): ``param_groups``, ``steps``,
        ``counters``, ... From one rank, or the same from several.
    parallelism : mapping, optional
        Facts about the layout that runs: ``{"dp": 4, "zero_stage": 1}``. As ``common``.
    aliases : mapping of str to sequence of str, optional
        Other names of tied parameters. As ``common``.
    order : sequence of str, optional
        Names in the model's order; by default they are in the order of the ranks' parts. As ``common``.
    threads, memory_limit, retries, storage_options, on_event
        As for `convert`.
    timeout : float, seconds
        How long to wait for other ranks at any one step.
    wait : bool
        Return when the checkpoint is visible, not when this rank's part is written.

    Returns
    -------
    Report
        ``committed`` is False only without ``wait``.

    Raises
    ------
    AlreadyExistsError
        ``url`` holds, or is claimed for, something else; or another attempt has begun (``ABANDONED``).
    LayoutError
        The parts leave gaps, overlap, or do not fit together; nothing was written.
    IntegrityError
        Replicas differ (``REPLICAS_DIFFER``), or a staged part was damaged.
    WorkerError
        Another rank did not come within the timeout.
    StorageError

    Examples
    --------
    >>> mine = [Held("w", "fp32", flat[:500], (20, 50), start=500 * rank)]      # doctest: +SKIP
    >>> ucpstore.save_rank("s3://b/run/step-100", mine, rank=rank, world=2)      # doctest: +SKIP
    """
    from ucpstore.parts.live import save_parts

    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else parse_bytes(memory_limit)
    return save_parts(
        open_files(url, storage_options),
        parts,
        rank=rank,
        world=world,
        facts={
            "common": common,
            "parallelism": parallelism,
            "aliases": aliases,
            "order": None if order is None else list(order),
        },
        workers=Workers(threads=threads, memory_limit=limit),
        settings=Settings(threads=1, retries=retries),
        timeout=timeout,
        wait=wait,
        emit=on_event,
    )


def abandon(dest: Url, *, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Free the claim of a conversion into ``dest`` that will never be finished.

    Workers of that conversion that still live notice before their next object and stop. Objects they
    left are overwritten by the next conversion.

    Returns
    -------
    str or None
        Plan digest that held the claim; None where there was no open claim.
    """
    from ucpstore.formats.deepspeed.commit import DeepSpeedLog
    from ucpstore.store.protocol import CommitLog

    files = open_files(os.fspath(dest), storage_options)
    native = files.stat(COMMIT) is not None
    return (DeepSpeedLog if native else CommitLog)(files).abandon()


def verify(
    url: Urls,
    *,
    against: Urls | None = None,
    quick: bool = False,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    format: str = "auto",  # noqa: A002
    tag: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    against_options: Mapping[str, Any] | None = None,
) -> Verification:
    """Read every byte of a checkpoint and check it.

    Checksums of every chunk, the recorded digest of every state, and replicas against each other; with
    ``against`` also every element and the common state against another checkpoint (of any format), which
    may hold nothing more. All findings are collected. A ``mapping`` is that of the conversion: ``against`` is seen
    through it. ``quick`` reads nothing: it compares listings of one of our own checkpoints with what its root
    document names, after a copy by other tools, say.

    Returns
    -------
    Verification
        ``findings`` is empty where everything is right.
    """
    from ucpstore.inspect.verify import verify_listing, verify_source

    if quick and against is not None:
        raise PlanError("a quick look at objects reads none: against= cannot be compared with.")
    if mapping is not None and against is None:
        raise PlanError("a mapping is what the other checkpoint is seen through: give against=.")
    rules = Patterns.of(patterns)
    checkpoint = open(url, format=format, tag=tag, patterns=rules, storage_options=storage_options)
    if quick:
        return verify_listing(checkpoint.source)
    other = None
    if against is not None:
        seen = open(against, patterns=rules, mapping=mapping, storage_options=against_options)
        other = seen.source
    return verify_source(checkpoint.source, against=other)


def diff(
    left: Urls,
    right: Urls,
    *,
    patterns: Rules | None = None,
    mapping: NameMapping | None = None,
    left_options: Mapping[str, Any] | None = None,
    right_options: Mapping[str, Any] | None = None,
) -> Diff:
    """Compare two checkpoints of any format, bit by bit; equal digests settle without reading.

    How parameters lie on ranks is not compared; ``patterns`` are for both sides. ``left`` is seen through
    ``mapping``.

    Returns
    -------
    Diff
        Every state as equal, changed, added or removed, and differences of the common state.
    """
    from ucpstore.inspect.diff import diff_sources

    rules = Patterns.of(patterns)
    return diff_sources(
        open(left, patterns=rules, mapping=mapping, storage_options=left_options).source,
        open(right, patterns=rules, storage_options=right_options).source,
    )
