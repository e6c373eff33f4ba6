"""Data on stdout, everything else on stderr; one place that turns errors into exit codes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn

import click

from ucpstore.errors import IntegrityError, StorageError, UcpStoreError

__all__ = [
    "EXIT_FINDINGS",
    "EXIT_INTEGRITY",
    "EXIT_INTERRUPTED",
    "EXIT_SOURCE",
    "EXIT_STORAGE",
    "Output",
    "options",
]

EXIT_FINDINGS = 1
EXIT_SOURCE = 3
EXIT_STORAGE = 4
EXIT_INTEGRITY = 5
EXIT_INTERRUPTED = 130


class Output:
    """How one command talks: for people, or as JSON (``--json``)."""

    def __init__(
        self,
        *,
        as_json: bool,
        quiet: bool,
        verbose: int,
        color: bool,
        storage_options: Mapping[str, Any],
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color and "NO_COLOR" not in os.environ and sys.stderr.isatty()
        self.storage_options = dict(storage_options)

    def data(self, text: str) -> None:
        """The result, for people."""
        click.echo(text)

    def json(self, document: Any) -> None:
        """The result, as one line of JSON."""
        click.echo(json.dumps(document, ensure_ascii=False, separators=(",", ":")))

    def note(self, text: str) -> None:
        """A remark on stderr; silent with ``--quiet``."""
        if not self.quiet:
            click.echo(text, err=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Aligned columns on stdout."""
        lines = [list(header), *(list(row) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            click.echo("  ".join(cells).rstrip())

    def fail(self, error: UcpStoreError) -> NoReturn:
        """Print an error and leave with its exit code."""
        if self.as_json:
            click.echo(json.dumps({"error": _describe(error)}, ensure_ascii=False))
        if self.verbose >= 2:
            traceback.print_exception(error)
        prefix = "error:"
        click.echo(f"{click.style(prefix, fg='red') if self.color else prefix} {error}", err=True)
        code = EXIT_SOURCE
        if isinstance(error, IntegrityError):
            code = EXIT_INTEGRITY
        elif isinstance(error, StorageError):
            code = EXIT_STORAGE
        sys.exit(code)


def _describe(error: UcpStoreError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "kind": str(error.kind),
        "message": error.message,
        "hint": error.hint,
        "context": {name: str(value) for name, value in error.context.items()},
    }


def _storage_options(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", ctx=context, param=option)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags that every command has; passes an `Output` as ``output`` and handles errors."""

    @click.option("--json", "as_json", is_flag=True, help="Print JSON (schemas/ describes it).")
    @click.option("-q", "--quiet", is_flag=True, help="No progress and no remarks on stderr.")
    @click.option("-v", "--verbose", count=True, help="More detail; -vv prints tracebacks.")
    @click.option("--no-color", is_flag=True, help="Plain text (NO_COLOR does the same).")
    @click.option(
        "--storage-option",
        "storage_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=_storage_options,
        help="Option of the storage backend, in fsspec's words; may be repeated.",
    )
    @wraps(command)
    def wrapped(
        *args: Any,
        as_json: bool,
        quiet: bool,
        verbose: int,
        no_color: bool,
        storage_options: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        output = Output(
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
            color=not no_color,
            storage_options=storage_options,
        )
        try:
            command(*args, output=output, **kwargs)
        except UcpStoreError as error:
            output.fail(error)
        except KeyboardInterrupt:
            click.echo("interrupted; run the same command again to continue", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return wrapped
