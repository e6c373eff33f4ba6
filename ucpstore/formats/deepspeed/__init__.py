"""Reader of DeepSpeed checkpoints."""

from __future__ import annotations

from ucpstore.formats.deepspeed.reader import DeepSpeedFormat

__all__ = ["FORMAT", "DeepSpeedFormat"]

FORMAT = DeepSpeedFormat()
"""What the entry point ``deepspeed`` in the group ``ucpstore.formats`` loads."""
