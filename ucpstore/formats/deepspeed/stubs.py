"""Which classes the pickles of a DeepSpeed checkpoint may name, and what becomes of them.

None of them is imported. An instance becomes an inert `ucpstore.tagged.StubObject` that holds its
attributes; enum members of DeepSpeed become their plain integer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ucpstore.formats.torchfile import StubObject, TorchFile, index_torch_file
from ucpstore.io.base import Files

__all__ = ["PREFIXES", "STUBS", "index", "plain"]


def _member(value: Any = 0, *_: Any) -> Any:
    """An enum member is pickled as its class called with the value."""
    return value


STUBS: Mapping[str, Callable[..., Any] | None] = {
    "argparse.Namespace": None,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _member,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": _member,
}
PREFIXES = ("deepspeed.", "megatron.", "transformers.")
"""Modules whose classes turn up in optimizer states, Megatron's ``args`` and configurations."""


def index(files: Files, name: str) -> TorchFile:
    """Index one file of the checkpoint with this allow-list."""
    return index_torch_file(files, name, stubs=STUBS, stub_prefixes=PREFIXES)


def plain(value: Any) -> Any:
    """The attributes of a stub; anything else as it is."""
    if isinstance(value, StubObject):
        return value.state if value.state is not None else value.contents
    return value
