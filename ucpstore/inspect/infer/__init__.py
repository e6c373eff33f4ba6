"""How a checkpoint that does not say so was cut over tensor-parallel ranks: inference, explanation, checks."""

from __future__ import annotations

from ucpstore.inspect.infer.check import CheckFinding, PatternCheck, check_sources
from ucpstore.inspect.infer.decide import Verdict
from ucpstore.inspect.infer.explain import Explanation, ParameterExplanation, explain_sources
from ucpstore.inspect.infer.report import Inference, Proposal, infer_sources

__all__ = [
    "CheckFinding",
    "Explanation",
    "Inference",
    "ParameterExplanation",
    "PatternCheck",
    "Proposal",
    "Verdict",
    "check_sources",
    "explain_sources",
    "infer_sources",
]
