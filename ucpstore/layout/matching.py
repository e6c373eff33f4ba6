"""What a rule matches: templates, and regular expressions as frameworks write them into their checkpoints."""

from __future__ import annotations

import re

from ucpstore.errors import Kind, PatternError
from ucpstore.layout.names import Template

__all__ = ["Matcher", "PrefixRegex", "exact_name", "exactly", "numbered"]

_MAX_LENGTH = 1000
_MAX_UNBOUNDED = 3
_QUANTIFIED_GROUP = re.compile(r"(?<!\\)\)[*+?{]")
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|(?<!\\)\{\d*,\d*\}")


class PrefixRegex:
    """A regular expression that matches the beginning of a name, as DeepSpeed applies its own.

    What is allowed is at most cubic in the length of a name: the expression may come from an untrusted file,
    and a backtracking matcher has no time limit. That covers what DeepSpeed and Megatron write.

    Raises
    ------
    PatternError
        It is none, or could take very long to match.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise PatternError(f"found {text!r:.80}, expected a regular expression.")
        self.text = text
        self.literal = _literal(text)
        """The one name that it matches, where it is ``^escaped name$``: AutoTP writes one per parameter."""
        if self.literal is not None:
            return
        if (
            len(text) > _MAX_LENGTH
            or _QUANTIFIED_GROUP.search(text)
            or len(_UNBOUNDED.findall(text)) > _MAX_UNBOUNDED
        ):
            raise PatternError(
                f"{text[:200]!r} could take very long to match: expected at most {_MAX_UNBOUNDED} unbounded"
                " repeats, none of them of a group.",
                kind=Kind.UNSUPPORTED,
            )
        try:
            self._regex = re.compile(text)
        except re.error as error:
            raise PatternError(f"{text!r} is no regular expression: {error}.") from error

    def match(self, name: str) -> dict[str, str] | None:
        """Empty if it matches, None if not."""
        if self.literal is not None:
            return {} if name == self.literal else None
        return None if self._regex.match(name) is None else {}

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"PrefixRegex({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixRegex) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


def _literal(pattern: str) -> str | None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    body = pattern[1:-1]
    name = re.sub(r"\\(.)", r"\1", body)
    return name if re.escape(name) == body else None


Matcher = Template | PrefixRegex

_PLAIN = re.compile(r"[^*{}]{1,1000}")
_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9][0-9]{0,8})(?=\.|$)")
"""A whole segment of a name: the number of a layer or an expert."""


def exactly(name: str) -> Matcher:
    """What matches one name only."""
    return Template(name) if _PLAIN.fullmatch(name) else PrefixRegex(f"^{re.escape(name)}$")


def exact_name(matcher: Matcher) -> str | None:
    """The one name that it matches, if it is one."""
    if isinstance(matcher, PrefixRegex):
        return matcher.literal
    return matcher.text if matcher.is_literal else None


def numbered(name: str) -> Template | None:
    """The template of all names that differ from this one in the numbers of layers and experts only.

    Examples
    --------
    >>> numbered("model.layers.3.experts.7.weight")
    Template('model.layers.{n}.experts.{n2}.weight')
    """
    if not _PLAIN.fullmatch(name):
        return None
    count = 0

    def variable(_: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return "{n}" if count == 1 else f"{{n{count}}}"

    text = _NUMBER.sub(variable, name)
    return Template(text) if count else None
