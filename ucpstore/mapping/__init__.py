"""Names and affine transforms between model families: documents, and what they do to names and shapes."""

from __future__ import annotations

from ucpstore.mapping.mapping import Mapping, Pass

__all__ = ["Mapping", "Pass"]
