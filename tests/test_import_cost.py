"""Importing costs nothing, and reading needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.deepspeed_runs import deepspeed_run

HEAVY = ("numpy", "torch", "zarr", "tensorstore", "fsspec", "s3fs", "rich", "deepspeed", "msgspec")


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import ucpstore") == set()


def test_mappings_need_no_arrays() -> None:
    code = "import ucpstore\nname = 'meta-llama-to-hf'\n"
    code += "ucpstore.Mapping.preset(name, heads=2, kv_heads=2).inverse()"
    assert loaded_after(code) <= {"msgspec"}


def test_opening_and_converting_need_neither_torch_nor_tensorstore(tmp_path: Path) -> None:
    run = deepspeed_run("s2-bf16-dp2")
    code = f"""
import ucpstore
checkpoint = ucpstore.open({str(run.path)!r})
next(p for p in checkpoint.values() if "adam_v" in p).adam_v[...]
ucpstore.convert({str(run.path)!r}, {str(tmp_path / "s")!r})
"""
    assert loaded_after(code) <= {"numpy", "msgspec"}


def test_a_local_store_is_read_without_torch_and_tensorstore(tmp_path: Path) -> None:
    run, store = deepspeed_run("s2-bf16-dp2"), str(tmp_path / "s")
    code = f"""
import ucpstore
ucpstore.convert({str(run.path)!r}, {store!r})
for parameter in ucpstore.open({store!r}).values():
    for state in parameter.values():
        state[...]
assert ucpstore.verify({store!r}).ok
"""
    assert loaded_after(code) <= {"numpy", "msgspec"}
