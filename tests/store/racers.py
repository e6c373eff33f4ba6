"""Processes that convert into one destination at the same time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.fakes import ArraySource
from tests.store.stores import convert, make_target, small_source
from ucpstore.errors import UcpStoreError
from ucpstore.io import open_files

__all__ = ["race", "source_of"]

_SECONDS = 240


def source_of(plan: str) -> ArraySource:
    """The source of a plan: equal shapes, other values."""
    source = small_source()
    for fqn, state in (("z.weight", "fp32"), ("a", "fp32"), ("experts.1.w", "fp32")):
        source._arrays[fqn, state] += np.float32(ord(plan[0]))
    return source


def _run(
    plan: str,
    where: tuple[str, Mapping[str, Any], Mapping[str, str]],
    start: Any,
    results: Any,
) -> None:
    url, options, environment = where
    os.environ.pop(
        "TENSORSTORE_GCS_HTTP_URL", None
    )  # of the server that the fork server began with
    os.environ.update(environment)
    source = source_of(plan)
    target = make_target(open_files(url, options), source)
    start.wait(_SECONDS)
    try:
        convert(target, source, digest=plan)
        results.put((plan, ""))
    except UcpStoreError as error:
        results.put((plan, f"{error.kind}: {error}"))


def race(
    plans: Sequence[str],
    url: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
) -> list[tuple[str, str]]:
    """Convert every plan in a process of its own; plan and error (empty: it succeeded) of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start, results = context.Barrier(len(plans)), context.Queue()
    where = (url, dict(options), dict(environment))
    processes = [context.Process(target=_run, args=(plan, where, start, results)) for plan in plans]
    for process in processes:
        process.start()
    found = [results.get(timeout=_SECONDS) for _ in processes]
    for process in processes:
        process.join(_SECONDS)
    return found
