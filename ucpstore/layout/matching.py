"""Regular expressions over names, as frameworks write them into their checkpoints."""

from __future__ import annotations

import re

from ucpstore.errors import Kind, PatternError

__all__ = ["PrefixRegex"]

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
