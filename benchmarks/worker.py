"""The measured calls, each run in a process of its own: ``python -m benchmarks.worker NAME JSON``.

Prints one JSON object: ``wall``, ``cpu``, ``read``, ``written`` of the call alone (imports excluded) and what
else the operation wants to report.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.process import Sampler, bytes_of, cpu_of, descendants, tree_anonymous

Result = dict[str, Any]


@contextmanager
def clock(result: Result) -> Iterator[None]:
    """Put what the block costs into ``result``; processes that it started and waited for count."""
    before, begin = _accounts(), time.perf_counter()
    yield
    result["wall"] = time.perf_counter() - begin
    for key, first, last in zip(("cpu", "read", "written"), before, _accounts(), strict=True):
        result[key] = last - first


def _accounts() -> tuple[float, int, int]:
    """CPU seconds, bytes read, bytes written so far: of this process, of its live descendants, and of
    all that either has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu, read, written = sum(u.ru_utime + u.ru_stime for u in usages), 0, 0
    for pid in descendants(os.getpid()):
        more_read, more_written = bytes_of(pid)
        read, written = read + more_read, written + more_written
        cpu += cpu_of(pid) if pid != os.getpid() else 0
    return cpu, read, written


def copy(source: str, dest: str, block: int) -> Result:
    """Copy the tensor bytes of all optimizer files: one thread, one reused buffer, one sync at the end.

    ZeRO-1's optimizer files hold the fp32 weights and the two moments and nothing else of any size.
    """
    result: Result = {}
    buffer = memoryview(bytearray(block))
    spans = list(tensors(Path(source)))
    Path(dest).mkdir(parents=True)
    with clock(result):
        for number, (path, start, length) in enumerate(spans):
            reader = os.open(path, os.O_RDONLY)
            writer = os.open(
                Path(dest, f"{number:04d}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
            )
            for done in range(0, length, block):
                part = buffer[: min(block, length - done)]
                if os.preadv(reader, [part], start + done) != len(part) or os.write(
                    writer, part
                ) != len(part):
                    raise OSError(f"{path} ended early, or the disk is full")
            os.close(reader)
            os.close(writer)
        _sync_file_system(dest)
    return result | {"nbytes": sum(length for _, _, length in spans)}


def tensors(source: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, bytes) of every storage in the optimizer files (zip local headers: APPNOTE 4.3.7)."""
    tag = source / (source / "latest").read_text().strip()
    for path in sorted(tag.glob("*_optim_states.pt")):
        with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
            for entry in archive.infolist():
                if "/data/" in entry.filename and entry.file_size:
                    stream.seek(entry.header_offset + 26)
                    names = stream.read(4)
                    skip = (
                        30
                        + int.from_bytes(names[:2], "little")
                        + int.from_bytes(names[2:], "little")
                    )
                    yield path, entry.header_offset + skip, entry.file_size


def _sync_file_system(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(folder):
            raise OSError(ctypes.get_errno(), "syncfs", path)
    finally:
        os.close(folder)


def convert(source: str, dest: str, other: str, scratch: str, **options: Any) -> Result:
    """``ucpstore.convert`` after imports: converting the tiny ``other`` first has loaded every module."""
    import ucpstore

    ucpstore.convert(other, scratch)
    result: Result = {}
    with clock(result):
        report = ucpstore.convert(source, dest, **options)
    return result | {
        "nbytes": report.state_nbytes,
        "report": report.to_json(),
        "torch": "torch" in sys.modules,
    }


def open_checkpoint(url: str, other: str) -> Result:
    """``ucpstore.open`` after imports: opening ``other`` first has loaded every module that it needs."""
    import ucpstore

    first: Result = {}
    with clock(first):
        ucpstore.open(other)
    result: Result = {}
    with clock(result):
        checkpoint = ucpstore.open(url)
    return result | {
        "first": first["wall"],
        "parameters": len(checkpoint),
        "torch": "torch" in sys.modules,
    }


def reshape(
    source: str, dest: str, other: str, scratch: str, *, layout: str, store: str | None = None
) -> Result:
    """Open, and write a native checkpoint of another layout: directly, or through our ``store``.

    The same was done with the tiny ``other`` before, so that all modules are loaded.
    """
    import ucpstore

    target = ucpstore.Layout.parse(layout)
    small = replace(target, dp=3)  # in its own layout nothing would be converted
    ucpstore.convert(other, f"{scratch}-store")
    ucpstore.convert(f"{scratch}-store", scratch, to="deepspeed", layout=small)
    costs: dict[str, Result] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        costs[name] = {}
        with clock(costs[name]):
            return call()

    step("open", lambda: ucpstore.open(source))
    if store is not None:
        step("store", lambda: ucpstore.convert(source, store))
    step("convert", lambda: ucpstore.convert(store or source, dest, to="deepspeed", layout=target))
    total = {
        key: sum(cost[key] for cost in costs.values()) for key in ("wall", "cpu", "read", "written")
    }
    return total | {"steps": {name: cost["wall"] for name, cost in costs.items()}}


def rank_load(url: str, layout: str, rank: int) -> Result:
    """``ucpstore.load`` of one rank into arrays that are there already, as a run's tensors are."""
    import numpy as np

    import ucpstore

    target = ucpstore.Layout.parse(layout)
    ucpstore.load(url, target, rank)  # loads every module that opening needs
    opened: Result = {}
    with clock(opened):
        state = ucpstore.load(url, target, rank)
    into = {
        fqn: {name: np.ones(tensor.shape, tensor.dtype) for name, tensor in states.items()}
        for fqn, states in state.items()
    }
    result: Result = {}
    with _increment(result), clock(result):
        transfer = state.load(into, memory_limit=2 << 30)
    result["wall"] += opened["wall"]
    return result | {
        "opened": opened["wall"],
        "needed": transfer.needed_nbytes,
        "storage_read": transfer.read_nbytes,
        "nbytes": transfer.held_nbytes,
    }


def torch_load(folder: str, rank: int) -> Result:
    """``torch.load`` of one rank's files, as DeepSpeed calls it for its own checkpoint."""
    import deepspeed  # noqa: F401 - what the pickles name
    import torch

    tag = Path(folder, Path(folder, "latest").read_text())
    paths = sorted(tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_*.pt"))
    if not any(path.name.endswith("model_states.pt") for path in paths):
        paths.append(tag / "mp_rank_00_model_states.pt")
    result: Result = {}
    with _increment(result), clock(result):
        kept = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    return result | {"nbytes": sum(path.stat().st_size for path in paths), "files": len(kept)}


@contextmanager
def _increment(result: Result) -> Iterator[None]:
    """Put into ``result`` how much anonymous memory the block took at most."""
    before = tree_anonymous(os.getpid())
    sampler = Sampler(os.getpid())
    sampler.start()
    yield
    sampler.stop()
    result["increment"] = max(sampler.peak, tree_anonymous(os.getpid())) - before


def slices(url: str, state: str, repeats: int = 7) -> Result:
    """Slices of the largest matrix: the median time of each, and the bytes read for it."""
    import ucpstore

    checkpoint = ucpstore.open(url)
    largest = max(
        (p for p in checkpoint.values() if len(p.shape) == 2), key=lambda p: p.shape[0] * p.shape[1]
    )
    tensor = largest[state]
    rows, columns = tensor.shape
    cuts = {
        "1/8 of the rows": (slice(rows // 8, rows // 4), slice(None)),
        "1/8 of the columns": (slice(None), slice(columns // 8, columns // 4)),
        "10 x 64 elements": (slice(10, 20), slice(0, 64)),
    }
    result: Result = {"fqn": largest.fqn, "shape": list(tensor.shape), "slices": {}}
    tensor[:1, :1]
    for name, index in cuts.items():
        costs: list[Result] = []
        for _ in range(repeats):
            cost: Result = {}
            before = _mapped_bytes()
            with clock(cost):
                values = tensor[index]
            cost["read"] += _mapped_bytes() - before
            costs.append(cost)
        costs.sort(key=lambda cost: cost["wall"])
        result["slices"][name] = costs[repeats // 2] | {"nbytes": values.nbytes}
    return result


def _mapped_bytes() -> int:
    """Bytes that TensorStore has read through memory maps in this process so far.

    The kernel does not count them as reading.
    """
    tensorstore = sys.modules.get("tensorstore")
    if tensorstore is None:
        return 0
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/file/mmap_bytes")
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])


def read_all(url: str, fresh: bool = False) -> Result:
    """Read every state of every parameter, into one reused buffer or into fresh arrays."""
    import numpy as np

    import ucpstore

    result: Result = {}
    with clock(result):
        checkpoint = ucpstore.open(url)
        tensors = [p[s] for p in checkpoint.values() for s in ("fp32", "adam_m", "adam_v")]
        if fresh:
            for tensor in tensors:
                tensor[...]
        else:
            buffer = np.empty(max(tensor.nbytes for tensor in tensors), np.uint8)
            for tensor in tensors:
                tensor.read(out=buffer[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
    return result | {"nbytes": sum(tensor.nbytes for tensor in tensors)}


def raw_read(url: str, how: str) -> Result:
    """Read every file of a store's arrays, whole: ``fromfile`` (fresh arrays) or ``preadv`` (a reused buffer)."""
    import numpy as np

    files = [(p, p.stat().st_size) for p in sorted(Path(url, "params").rglob("*")) if p.is_file()]
    result: Result = {}
    with clock(result):
        buffer = memoryview(bytearray(max(size for _, size in files)))
        for path, size in files:
            if how == "fromfile":
                np.fromfile(path, np.uint8)
            else:
                descriptor = os.open(path, os.O_RDONLY)
                if os.preadv(descriptor, [buffer[:size]], 0) != size:
                    raise OSError(f"{path} ended early")
                os.close(descriptor)
    return result | {"nbytes": sum(size for _, size in files)}


OPERATIONS: dict[str, Callable[..., Result]] = {
    operation.__name__: operation
    for operation in (
        copy,
        convert,
        reshape,
        rank_load,
        torch_load,
        open_checkpoint,
        slices,
        read_all,
        raw_read,
    )
}


if __name__ == "__main__":
    print(json.dumps(OPERATIONS[sys.argv[1]](**json.loads(sys.argv[2]))))
