"""Data on stdout, everything else on stderr; one place that turns errors into exit codes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn

import click

from ucpstore.errors import IntegrityError, StorageError, UcpStoreError, WorkerError
from ucpstore.io.urls import parse_url
from ucpstore.text import printable

__all__ = [
    "EXIT_FINDINGS",
    "EXIT_INTEGRITY",
    "EXIT_INTERNAL",
    "EXIT_INTERRUPTED",
    "EXIT_PIPE",
    "EXIT_SOURCE",
    "EXIT_STORAGE",
    "Output",
    "options",
    "parse_storage_options",
    "side_option",
]

EXIT_FINDINGS = 1
EXIT_SOURCE = 3
EXIT_STORAGE = 4
EXIT_INTEGRITY = 5
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141


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

    def options_of(
        self, *sides: tuple[str | None, Mapping[str, Any]]
    ) -> tuple[dict[str, Any], ...]:
        """Storage options of each side's URL: those for all sides, where it is no local one, then its own."""
        remote = [url is not None and parse_url(url).scheme in ("s3", "gs") for url, _ in sides]
        return tuple(
            {**(self.storage_options if is_remote or not any(remote) else {}), **own}
            for is_remote, (_, own) in zip(remote, sides, strict=True)
        )

    def data(self, text: str) -> None:
        """The result, for people."""
        _print("\n".join(map(printable, text.split("\n"))))

    def json(self, document: Any) -> None:
        """The result, as one line of JSON in ASCII."""
        _print(json.dumps(document, separators=(",", ":")))

    def note(self, text: str) -> None:
        """A remark on stderr; silent with ``--quiet``."""
        if not self.quiet:
            _complain(text)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Aligned columns on stdout."""
        lines = [list(header), *(list(map(printable, row)) for row in rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        for line in lines:
            cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            _print("  ".join(cells).rstrip())

    def fail(self, error: UcpStoreError) -> NoReturn:
        """Print an error and leave with its exit code."""
        code = EXIT_SOURCE
        if isinstance(error, IntegrityError):
            code = EXIT_INTEGRITY
        elif isinstance(error, StorageError | WorkerError):
            code = EXIT_STORAGE
        if self.verbose >= 2:
            traceback.print_exception(error)
        prefix = "error:"
        styled = click.style(prefix, fg="red") if self.color else prefix
        self._leave(code, _describe(error), str(error), prefix=styled)

    def interrupted(self) -> NoReturn:
        """Ctrl-C."""
        text = "interrupted; run the same command again to continue"
        self._leave(EXIT_INTERRUPTED, _plain("KeyboardInterrupt", "interrupted", text), text)

    def crash(self, error: Exception) -> NoReturn:
        """An error that nobody foresaw: a bug, and never taken for a result."""
        traceback.print_exception(error)
        text = f"internal error: {type(error).__name__}: {error}"
        self._leave(EXIT_INTERNAL, _plain(type(error).__name__, "internal", text), text)

    def _leave(
        self, code: int, document: Mapping[str, Any], text: str, *, prefix: str = ""
    ) -> NoReturn:
        if self.as_json:
            with suppress(OSError, StorageError):  # the exit code still tells
                self.json({"error": document})
        _complain(text, prefix)
        sys.exit(code)


def _print(text: str) -> None:
    """One text on stdout, in characters that its encoding has.

    Raises
    ------
    BrokenPipeError
        Nobody reads any more.
    StorageError
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write the output: {error.strerror or error}.",
            hint="Look at where stdout goes.",
        ) from error


def _complain(text: str, prefix: str = "") -> None:
    """One text on stderr; whoever closed it has chosen not to know."""
    shown = "\n".join(map(printable, text.split("\n")))
    with suppress(OSError):
        click.echo(f"{prefix} {shown}" if prefix else shown, err=True)


def _describe(error: UcpStoreError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "kind": str(error.kind),
        "message": error.message,
        "hint": error.hint,
        "context": {name: str(value) for name, value in error.context.items()},
    }


def _plain(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": name, "kind": kind, "message": text, "hint": "", "context": {}}


def side_option(side: str) -> Callable[[Any], Any]:
    """Decorator: storage options of one of two URLs, ``--SIDE-option``."""
    return click.option(
        f"--{side}-option",
        f"{side}_options",
        metavar="NAME=VALUE",
        multiple=True,
        callback=parse_storage_options,
        help=f"As --storage-option, for {side.upper()} only; may be repeated.",
    )


def parse_storage_options(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    """``NAME=VALUE`` options of the command line; values are JSON where they can be."""
    found: dict[str, Any] = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            # Not what was found: it may be a secret.
            raise click.BadParameter("expected NAME=VALUE", ctx=context, param=option)
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
        callback=parse_storage_options,
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
            output.interrupted()
        except BrokenPipeError:
            # Nothing may be flushed at exit; and what was asked for was not done to the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_PIPE)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:  # noqa: BLE001 - exit code 1 means findings
            output.crash(error)

    return wrapped
