"""How many ranges are read, and that none of them is tensor data."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from tests.formats.torchfiles import MemoryFiles, saved
from ucpstore.errors import StorageError
from ucpstore.formats.torchfile import (
    LOCAL_BLOCK,
    REMOTE_BLOCK,
    TensorRef,
    TorchFile,
    index_torch_file,
)


def model(layers: int, numel: int = 1 << 12) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((numel,), float(i)) for i in range(layers)}


def index_of(data: bytes, *, is_local: bool) -> tuple[TorchFile, list[tuple[str, int, int]]]:
    files = MemoryFiles({"x.pt": data}, is_local=is_local)
    return index_torch_file(files, "x.pt"), files.reads


def tensor_bytes_read(index: TorchFile, reads: list[tuple[str, int, int]]) -> int:
    """How many of the bytes that were read belong to storages."""
    total = 0
    for ref in index.root.values():
        assert isinstance(ref, TensorRef)
        start, end = ref.storage.offset, ref.storage.offset + ref.storage.nbytes
        total += sum(max(0, min(end, at + count) - max(start, at)) for _, at, count in reads)
    return total


def test_remote_zip_takes_two_reads() -> None:
    index, reads = index_of(saved(model(200)), is_local=False)
    assert len(reads) == 2
    assert {count for _, _, count in reads} == {REMOTE_BLOCK}
    # the blocks that are read ahead at both ends are all
    assert tensor_bytes_read(index, reads) <= 2 * REMOTE_BLOCK


def test_remote_zip_with_a_long_pickle_and_directory() -> None:
    data = saved(model(6000, numel=64))
    index, reads = index_of(data, is_local=False)
    assert len(reads) == 4  # head, tail, directory, the rest of the pickle
    assert len(index.root) == 6000
    for i in (0, 1, 2999, 5999):
        offset = index.root[f"layers.{i}.weight"].offset
        assert data[offset : offset + 256] == torch.full((64,), float(i)).numpy().tobytes()
    *_, (_, start, count) = reads
    assert start == REMOTE_BLOCK  # what is there already is not read again
    assert start + count <= index.root["layers.0.weight"].offset


def test_remote_legacy_takes_two_reads() -> None:
    index, reads = index_of(saved(model(200), use_zip=False), is_local=False)
    assert len(reads) <= 2
    assert tensor_bytes_read(index, reads) <= REMOTE_BLOCK


def test_remote_legacy_with_a_trailer_reads_every_count() -> None:
    data = saved(model(20, numel=1 << 16), use_zip=False)
    _, reads = index_of(data, is_local=False)
    assert len(reads) == 1
    _, reads = index_of(data + b"trailer", is_local=False)
    assert len(reads) > 15
    assert sum(count for _, _, count in reads[1:]) == 8 * (len(reads) - 1)


@pytest.mark.parametrize("use_zip", [True, False], ids=["zip", "legacy"])
def test_local_files_are_read_in_small_pieces(use_zip: bool) -> None:
    data = saved(model(30, numel=1 << 16), use_zip=use_zip)
    index, reads = index_of(data, is_local=True)
    # a local header with the record's name, or the length of a storage
    sizes = range(30, 60) if use_zip else range(8, 9)
    small = [count for _, _, count in reads if count in sizes]
    assert len(small) >= 29  # the first may lie in the block that was read ahead
    assert len(reads) - len(small) <= 4
    assert tensor_bytes_read(index, reads) <= 3 * LOCAL_BLOCK


def test_records_of_another_writer_are_found_by_their_headers() -> None:
    out = io.BytesIO()
    data = saved(model(10, numel=1 << 17))
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    data = out.getvalue()
    index, reads = index_of(data, is_local=False)
    assert len(reads) == 2 + sum(30 <= count < 60 for _, _, count in reads)
    for i, ref in enumerate(index.root.values()):
        assert (
            data[ref.offset : ref.offset + ref.nbytes]
            == torch.full((1 << 17,), float(i)).numpy().tobytes()
        )


def test_wrong_padding_rule_is_not_trusted() -> None:
    """With another alignment the two computed positions differ, so the headers are read."""
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = 4096
    try:
        data = saved(model(10, numel=1000))
    finally:
        config.save.storage_alignment = before
    index, _ = index_of(data, is_local=False)
    for i, ref in enumerate(index.root.values()):
        assert ref.offset % 4096 == 0
        assert (
            data[ref.offset : ref.offset + ref.nbytes]
            == torch.full((1000,), float(i)).numpy().tobytes()
        )


@pytest.mark.parametrize("failing", range(4))
def test_storage_errors_are_not_taken_for_damage(failing: int) -> None:
    class Failing(MemoryFiles):
        def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            if len(self.reads) == failing:
                raise StorageError("the connection was reset", retryable=True)
            return super().read(name, offset, nbytes)

    files = Failing({"x.pt": saved(model(6000, numel=64))}, is_local=False)
    with pytest.raises(StorageError, match="reset") as caught:
        index_torch_file(files, "x.pt")
    assert caught.value.retryable
