"""Facts for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from ucpstore import __version__

__all__ = ["environment"]

_PACKAGES = (
    "numpy",
    "tensorstore",
    "zarr",
    "numcodecs",
    "torch",
    "fsspec",
    "s3fs",
    "gcsfs",
    "deepspeed",
    "megatron-core",
)


def environment() -> dict[str, Any]:
    """Versions and limits of this machine; imports none of the packages that it names."""
    facts: dict[str, Any] = {
        "ucpstore": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count() or 1,
    }
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["formats"] = ", ".join(
        sorted(point.name for point in metadata.entry_points(group="ucpstore.formats"))
    )
    return facts
