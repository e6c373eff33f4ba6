"""``ucpstore patterns``: how parameters lie on tensor-parallel ranks."""

from __future__ import annotations

import sys
from typing import Any

import click

from ucpstore import inferring
from ucpstore.cli.output import EXIT_FINDINGS, Output, options
from ucpstore.errors import Kind, StorageError

__all__ = ["patterns"]


@click.group()
def patterns() -> None:
    """Find, explain and check rules of tensor parallelism.

    A rule says how the ranks' local tensors make up whole parameters. infer and explain read contents until
    the ranks differ, check reads all copies to the end.
    """


def _checkpoint(command: Any) -> Any:
    """Options that choose the checkpoint."""
    for option in (
        click.option("--tag", help="Checkpoint tag; by default the one that 'latest' names."),
        click.option(
            "--format", "format_", default="auto", show_default=True, help="Format of URL."
        ),
    ):
        command = option(command)
    return command


_known = click.option(
    "--patterns",
    "known",
    metavar="FILE|PRESET",
    help="Rules that are known: a TOML or JSON file, or a preset.",
)


@patterns.command()
@click.argument("url")
@_known
@click.option("--output", "-o", "path", metavar="FILE", help="Write the TOML there.")
@_checkpoint
@options
def infer(
    url: str, *, known: str | None, path: str | None, format_: str, tag: str | None, output: Output
) -> None:
    """Infer rules for URL where it does not say how it was cut. Prints TOML.

    Exits with 1 if a question is open: answer it in the TOML, by uncommenting a rule.
    """
    found = inferring.infer_patterns(
        url, patterns=known, format=format_, tag=tag, storage_options=output.storage_options
    )
    if path is not None:
        _write(path, found.toml())
    if output.as_json:
        output.json(found.to_json())
    elif path is None:
        output.data(found.toml().rstrip("\n"))
    if not output.as_json:
        output.note(found.summary())
    if found.questions:
        sys.exit(EXIT_FINDINGS)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, UnicodeEncodeError) as error:  # names may hold what no text file can
        raise StorageError(
            f"cannot write the rules to {path}: {getattr(error, 'strerror', None) or error}.",
            kind=Kind.IO,
            hint="Give --output a file that can be written.",
        ) from error


@patterns.command()
@click.argument("url")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_known
@_checkpoint
@options
def explain(
    url: str,
    names: tuple[str, ...],
    *,
    known: str | None,
    format_: str,
    tag: str | None,
    output: Output,
) -> None:
    """Say why the parameters NAME (by default all) of URL are taken to lie on the ranks as they do.

    Exits with 1 if no rule is for one of them, or the rule contradicts the evidence.
    """
    found = inferring.explain_patterns(
        url, names, patterns=known, format=format_, tag=tag, storage_options=output.storage_options
    )
    if output.as_json:
        output.json(found.to_json())
    elif names:
        for one in found.parameters:
            output.data("\n".join(one.words()))
    else:
        output.table(
            ("FQN", "PATTERN", "CONFIDENCE", "ORIGIN", "RANKS HOLD", "WHOLE"),
            (one.row() for one in found.parameters),
        )
    if not found.ok:
        sys.exit(EXIT_FINDINGS)


@patterns.command()
@click.argument("url")
@click.argument("rules", required=False)
@_checkpoint
@options
def check(url: str, rules: str | None, *, format_: str, tag: str | None, output: Output) -> None:
    """Try RULES (a TOML or JSON file, or a preset; by default the checkpoint's own) on URL.

    Finds parameters without a rule, rules that decide nothing, shapes that do not fit, and copies that
    differ. Exits with 1 if anything is found.
    """
    found = inferring.check_patterns(
        url, rules, format=format_, tag=tag, storage_options=output.storage_options
    )
    if output.as_json:
        output.json(found.to_json())
    else:
        output.data(found.summary())
    if not found.ok:
        sys.exit(EXIT_FINDINGS)
