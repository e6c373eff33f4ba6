"""Fixtures of the store's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder whose syncs cost nothing, where the machine has one."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="ucpstore-test-", dir=base)
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)
