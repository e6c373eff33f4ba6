"""Whether the files of a checkpoint belong together: ranks not exchanged, all of one save.

Names alone cannot tell: a folder that was assembled by hand, or written into twice, looks complete.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.errors import CorruptSourceError, Kind, listing
from ucpstore.formats.deepspeed.files import rank_of
from ucpstore.formats.deepspeed.module import Model
from ucpstore.formats.deepspeed.shards import Shard
from ucpstore.formats.torchfile import TensorRef, TorchFile, read_tensor
from ucpstore.io.base import Files

__all__ = [
    "compare_steps",
    "read_steps",
    "require_one_config",
    "require_one_run",
    "require_one_save",
    "require_own_rank",
]

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_SECTIONS = ("zero_optimization", "bf16", "fp16")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TOGETHER = "Take all files of a checkpoint from one save."


def require_own_rank(file: TorchFile) -> TorchFile:
    """Refuse a file that was saved under the name of another rank.

    torch names the records of a zip after the file that it writes (``torch.serialization``,
    ``_open_zipfile_writer_file``), and a renamed file keeps them.

    Raises
    ------
    CorruptSourceError
    """
    name = file.stat.name
    saved, now = rank_of(f"{file.saved_as}.pt"), rank_of(name)
    if saved is not None and now is not None and saved != now:
        raise CorruptSourceError(
            f"{name}: its content was saved as {file.saved_as}.pt, expected that of the same rank: the files of"
            " ranks were exchanged or renamed.",
            hint="Give the file its name back.",
            file=name,
        )
    return file


def read_steps(files: Files, shard: Shard) -> dict[int, Any]:
    """Step by unit, where the optimizer counts them in its state.

    Tensors, which must be read, are only read for the first unit that has one: a file of another save
    differs in it as well.
    """
    found: dict[int, Any] = {}
    was_read = False
    for unit, scalars in enumerate(shard.scalars):
        value = scalars.get("step")
        if isinstance(value, TensorRef):
            if value.numel != 1 or was_read:
                continue
            was_read = True
            array = read_tensor(files, shard.name, value, big_endian=shard.big_endian)
            value = array.reshape(-1)[0].item()
        if value is not None:
            found[unit] = value
    return found


def require_one_save(
    first: Shard, other: Shard, *, like: Mapping[int, Any], steps: Mapping[int, Any]
) -> None:
    """Optimizers of all ranks step together, with the same hyper-parameters.

    Parameters
    ----------
    first, other : Shard
    like, steps : mapping of int to number
        Their steps by unit.

    Raises
    ------
    CorruptSourceError
        The two files are of different saves or runs.
    """
    require_one_config(first.name, first.root, other.name, other.root)
    for unit, step in steps.items():
        expected = like.get(unit, step)
        if step != expected and (step == step or expected == expected):  # NaN equals nothing
            raise _apart(other.name, first.name, f"step of unit {unit}", step, expected)
    mine, theirs = first.groups or (), other.groups or ()
    if len(mine) != len(theirs):
        raise _apart(other.name, first.name, "number of groups", len(theirs), len(mine))
    for index, (group, model) in enumerate(zip(theirs, mine, strict=True)):
        for key in {**model, **group}:
            value, expected = group.get(key), model.get(key)
            if key != "params" and _plain(value) and _plain(expected) and value != expected:
                what = f"{key!r} of group {index}"
                raise _apart(other.name, first.name, what, value, expected)


def require_one_config(
    first: str, root: Mapping[str, Any], other: str, like: Mapping[str, Any]
) -> None:
    """Two files were written by one version of DeepSpeed in one configuration.

    Only what decides on the layout is compared; names of jobs or local paths may differ by rank.

    Parameters
    ----------
    first, other : str
        The two files.
    root, like : mapping
        Their ``ds_version`` and ``ds_config``.

    Raises
    ------
    CorruptSourceError
        The two files are of different runs.
    """
    mine, theirs = _facts(root), _facts(like)
    for key in mine.keys() & theirs.keys():
        if mine[key] != theirs[key]:
            raise _apart(other, first, key, theirs[key], mine[key])
    if not (root.get("ds_config") and like.get("ds_config")):
        return
    for key in sorted(mine.keys() ^ theirs.keys()):  # an option is left out where it is the default
        if (mine.get(key) or theirs.get(key)) and key != "ds_version":
            raise _apart(other, first, key, theirs.get(key), mine.get(key))


def _facts(root: Mapping[str, Any]) -> dict[str, Any]:
    """Plain options of the sections that decide on the layout, and the version."""
    config = root.get("ds_config")
    config = config if isinstance(config, Mapping) else {}
    options = {f"ds_config {key}": config.get(key) for key in _BATCH}
    for name in _SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping):
            options.update((f"ds_config {name}.{key}", value) for key, value in section.items())
    options["ds_version"] = root.get("ds_version")
    return {key: value for key, value in options.items() if value is not None and _plain(value)}


def require_one_run(
    first: Model, other: Model, *, same_shapes: bool, same_names: bool = True
) -> None:
    """Model files of all ranks count the same steps; those of one pipeline stage hold the same names.

    Parameters
    ----------
    first, other : Model
    same_names : bool
        They are of one pipeline stage.
    same_shapes : bool
        They are of one model-parallel rank, so that shapes are equal too.

    Raises
    ------
    CorruptSourceError
        The two files are of different saves or runs.
    """
    require_one_config(first.name, first.rest, other.name, other.rest)
    for key in _COUNTERS:
        value, expected = other.rest.get(key), first.rest.get(key)
        if _plain(value) and _plain(expected) and value != expected:
            raise _apart(other.name, first.name, key, value, expected)
    if not same_names:
        return
    for what, mine, theirs in (
        ("module", first.module, other.module),
        ("buffer_names", first.buffer_names, other.buffer_names),
        ("frozen_param_shapes", first.frozen_shapes or (), other.frozen_shapes or ()),
        ("param_shapes", first.trainable, other.trainable),
    ):
        differ = sorted(set(mine) ^ set(theirs))
        if differ:
            raise CorruptSourceError(
                f"{other.name} and {first.name} do not belong together: {what} names"
                f" {listing(map(repr, differ), cap=3)} in only one of them.",
                hint=_TOGETHER,
                kind=Kind.MISSING_KEY,
            )
    if not same_shapes:
        return
    for what, shapes, like in (
        ("param_shapes", other.shapes, first.shapes),
        ("frozen_param_shapes", [other.frozen_shapes or {}], [first.frozen_shapes or {}]),
    ):
        if [list(group.items()) for group in shapes] != [list(group.items()) for group in like]:
            raise CorruptSourceError(
                f"{other.name} and {first.name} do not belong together: {what} has other shapes or another order"
                " in them.",
                hint=_TOGETHER,
                kind=Kind.SHAPE,
            )


def _plain(value: Any) -> bool:
    """A number, a text, nothing, or lists of those; not NaN, which equals nothing."""
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    if isinstance(value, float):
        return not math.isnan(value)
    return value is None or isinstance(value, bool | int | str)


def _apart(name: str, first: str, what: str, value: object, expected: object) -> CorruptSourceError:
    return CorruptSourceError(
        f"{name} and {first} do not belong together: {what} is {value!r:.40} and {expected!r:.40}: they are of"
        " different saves or runs.",
        hint=_TOGETHER,
        file=name,
    )


def compare_steps(steps: Mapping[str, Any], model: Model) -> Sequence[str]:
    """Warn where the optimizer's steps cannot be those that the engine counts.

    One that stepped at its initialisation, as old versions do, has one more.

    Parameters
    ----------
    steps : mapping of str to number
        By parameter.
    model : Model
    """
    total, skipped = model.rest.get("global_steps"), model.rest.get("skipped_steps")
    counted = [step for step in steps.values() if isinstance(step, int | float)]
    if not counted or not isinstance(total, int) or not isinstance(skipped, int):
        return []
    taken = total - skipped
    if max(counted) in (taken, taken + 1):
        return []
    text = (
        f"the optimizer counts {max(counted):g} steps, but {model.name} {taken} ({total} with {skipped} skipped):"
        " the optimizer started anew during the run, or the model file is of another save."
    )
    return [text]
