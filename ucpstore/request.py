"""What a conversion was asked for, checked, so that every process that takes part opens the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucpstore.contracts import Source
from ucpstore.engine.plan import Plan, make_plan
from ucpstore.errors import (
    PlanError,
)
from ucpstore.io import Url, open_files, open_roots, root_urls
from ucpstore.io.base import Files
from ucpstore.io.serverside import same_storage
from ucpstore.io.urls import parse_url
from ucpstore.layout.parallel import Layout
from ucpstore.opening import Rules, Urls, View, make_view, open_source

if TYPE_CHECKING:
    from ucpstore.formats.deepspeed.writer import DeepSpeedTarget
    from ucpstore.mapping import Mapping as NameMapping
    from ucpstore.store.target import ZarrTarget

__all__ = ["SAME_LAYOUT", "Request", "open_job", "require_objects"]

SAME_LAYOUT = (
    "the source has this layout already: DeepSpeed loads it as it is, and convert would do nothing."
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that decides a conversion, checked, so that a worker process can open it again."""

    source: tuple[str, ...]
    dest: str
    layout: Layout | None
    format: str
    tag: str | None
    states: tuple[str, ...] | None
    only: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    source_options: Mapping[str, Any] = field(repr=False)
    dest_options: Mapping[str, Any] = field(repr=False)
    view: View

    @classmethod
    def of(
        cls,
        source: Urls,
        dest: Url,
        *,
        to: str,
        layout: Layout | None,
        patterns: Rules | None,
        mapping: NameMapping | None,
        unfreeze: Mapping[str, int] | None,
        format: str,  # noqa: A002
        tag: str | None,
        states: Sequence[str] | None,
        only: Sequence[str] | None,
        exclude: Sequence[str] | None,
        source_options: Mapping[str, Any] | None,
        dest_options: Mapping[str, Any] | None,
    ) -> Request:
        """What `convert` and `plan` were asked for."""
        _check_target(to, layout, {"states": states, "only": only, "exclude": exclude})
        if unfreeze is not None and to != "deepspeed":
            raise PlanError(
                "unfreeze is for the run that loads a native checkpoint: give it with to='deepspeed'."
            )
        return cls(
            # In full: a worker process may have another working directory.
            source=root_urls(source),
            dest=parse_url(dest).url,
            layout=layout,
            format=format,
            tag=tag,
            view=make_view(patterns, mapping, unfreeze),
            states=_names("states", states),
            only=_names("only", only),
            exclude=_names("exclude", exclude),
            source_options=dict(source_options or {}),
            dest_options=dict(dest_options or {}),
        )

    def open(self, *, ranks: bool = False) -> tuple[Plan, Source, ZarrTarget | DeepSpeedTarget]:
        """Open the source, lay out the target and plan; reads metadata only.

        With ``ranks`` the plan of a native target lists which rank will hold which parts.
        """
        origin = open_roots(self.source, self.source_options)
        source = open_source(origin, self.format, self.tag, self.view)
        files = open_files(self.dest, self.dest_options)
        if same_storage(origin, files):
            _refuse_inside(source, files)
        if self.layout is not None:
            return self._open_native(source, files, self.layout, ranks=ranks)
        return self.open_zarr(source, files)

    def _open_native(
        self, source: Source, files: Files, layout: Layout, *, ranks: bool
    ) -> tuple[Plan, Source, DeepSpeedTarget]:
        from ucpstore.formats.deepspeed.writer import DeepSpeedTarget, same_layout

        rules = self.view.patterns
        target = DeepSpeedTarget(files, source, layout, rules)
        warnings = [*target.warnings]
        changed = self.view.mapping is not None or self.view.unfreeze
        if not changed and len(self.source) == 1 and same_layout(source, layout, rules):
            warnings.append(SAME_LAYOUT)
        plan = make_plan(
            source,
            target,
            states=target.states,
            free_space=files.free_space(),
            layout=target.layout() if ranks else layout.to_json(),
            warnings=warnings,
        )
        return plan, source, target

    def open_zarr(self, source: Source, files: Files) -> tuple[Plan, Source, ZarrTarget]:
        from ucpstore.store.grid import plan_arrays
        from ucpstore.store.target import ZarrTarget

        arrays = plan_arrays(source, states=self.states, only=self.only, exclude=self.exclude)
        target = ZarrTarget(files, arrays, source=source, step=_step(source))
        members = [member for array in arrays for member in array.members]
        return (
            make_plan(source, target, states=members, free_space=files.free_space()),
            source,
            target,
        )


def open_job(request: Request) -> tuple[str, Source, ZarrTarget | DeepSpeedTarget]:
    found, source, target = request.open()
    return found.digest, source, target


def require_objects(source: Source) -> None:
    """Refuse a store that lacks objects before anything is written; formats of frameworks did so on opening."""
    from ucpstore.store.source import StoreSource

    if isinstance(source, StoreSource):
        source.require_objects()


def _refuse_inside(source: Source, dest: Files) -> None:
    """A store is what its root document says; nothing else may be written into it."""
    inside = f"{dest.url}/".startswith(f"{source.url.rstrip('/')}/")
    if inside and source.format == "ucpstore":
        raise PlanError(
            f"{dest.url} is inside the source {source.url}, expected a destination outside of it.",
            hint="Choose another destination.",
        )


def _step(source: Source) -> int | None:
    """The training step, where the source counts steps."""
    counters = source.common.document.get("counters")
    step = counters.get("global_steps") if isinstance(counters, Mapping) else None
    return step if type(step) is int else None


def _check_target(
    to: str, layout: Layout | None, selection: Mapping[str, Sequence[str] | None]
) -> None:
    """Whether what is asked for is something that can be written."""
    if to == "zarr":
        if layout is not None:
            raise PlanError(
                "a Zarr hierarchy has no layout of ranks: give layout= with to='deepspeed'."
            )
        return
    if to != "deepspeed":
        raise PlanError(f"cannot convert to {to!r}: expected 'zarr' or 'deepspeed'.")
    if not isinstance(layout, Layout):
        raise PlanError(
            f"cannot convert to deepspeed with layout={layout!r}: expected a Layout.",
            hint="Say how the run will be spread, such as Layout(dp=2, zero_stage=3).",
        )
    chosen = [name for name, names in selection.items() if names is not None]
    if chosen:
        raise PlanError(
            f"cannot convert a selection ({', '.join(chosen)}) to deepspeed: it loads whole models only."
        )


def _names(option: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise PlanError(
                f"cannot select {option}={name!r}: found {type(name).__name__}, expected names."
            )
    return found
