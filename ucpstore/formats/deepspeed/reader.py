"""Open a DeepSpeed checkpoint virtually: metadata is read, tensor bytes are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ucpstore.contracts import CommonState, Detection, SourceFile
from ucpstore.errors import (
    CorruptSourceError,
    IncompleteSourceError,
    Kind,
    PatternError,
    UnsupportedSourceError,
    listing,
)
from ucpstore.formats.deepspeed import files as rank_files
from ucpstore.formats.deepspeed.agreement import (
    compare_steps,
    read_steps,
    require_one_config,
    require_one_run,
    require_one_save,
    require_own_rank,
)
from ucpstore.formats.deepspeed.assemble import Assembly
from ucpstore.formats.deepspeed.autotp import OneRank, TensorParallel
from ucpstore.formats.deepspeed.common import collect_common
from ucpstore.formats.deepspeed.files import RankFiles
from ucpstore.formats.deepspeed.module import Model, read_model, take_census
from ucpstore.formats.deepspeed.naming import Prober
from ucpstore.formats.deepspeed.pipeline import Layers, fill_shapes, read_layers
from ucpstore.formats.deepspeed.shards import Shard, read_shard
from ucpstore.formats.deepspeed.stage0 import NAMES_FILE, Names, Stage0, read_names, read_stage0
from ucpstore.formats.deepspeed.stage0_pipeline import read_stages
from ucpstore.formats.deepspeed.stages import align_groups, require_stages
from ucpstore.formats.deepspeed.states import compare_mappings
from ucpstore.formats.deepspeed.stubs import index
from ucpstore.formats.deepspeed.units import GroupUnit, SubGroupUnit, Unit
from ucpstore.formats.torchfile import TorchFile
from ucpstore.io.base import Files, FileStat
from ucpstore.layout.rules import Patterns
from ucpstore.pieces import PieceSource

__all__ = ["DeepSpeedFormat"]

_LOCAL_THREADS = 4
_REMOTE_THREADS = 32

_T = TypeVar("_T")


class DeepSpeedFormat:
    """Checkpoints of DeepSpeed ZeRO 0, 1, 2, 3 and BF16_Optimizer, with AutoTP, pipelines or without."""

    name = "deepspeed"

    def detect(self, files: Files) -> Detection:
        """Whether a DeepSpeed checkpoint is at the URL, judged by names only."""
        return rank_files.detect(files)

    def open(
        self,
        files: Files,
        *,
        tag: str | None = None,
        patterns: Patterns | None = None,
        rank: int | None = None,
    ) -> PieceSource:
        """Index a checkpoint: a ``save_dir`` (its ``latest`` or ``tag``), or a tag's own folder.

        Parameters
        ----------
        files : Files
        tag : str, optional
        patterns : Patterns, optional
            Rules that count before the checkpoint's own. Those that are for no parameter are warned of, where
            DeepSpeed's converter stops.
        rank : int, optional
            Open what this tensor-parallel rank holds, as it is, instead of the whole parameters.

        Raises
        ------
        IncompleteSourceError
            Rank files or states are missing; they are named.
        CorruptSourceError
            A file is truncated or not what its name says.
        UnsafePickleError
            A file names a class outside the allow-list.
        UnsupportedSourceError
            MoE, universal or offloaded checkpoints, unknown layouts.
        PatternError
            Tensor-parallel slices that no rule describes; stage 0 whose optimizer's parameters can have
            several names.
        """
        found = rank_files.discover(files, tag)
        return _Opening(files, found, patterns or Patterns(), rank).source()


@dataclass(slots=True)
class _Ranks:
    """Everything that was read, by model-parallel rank."""

    models: list[Model]
    shards: list[list[Shard]]
    units: list[list[Unit]]
    layers: Layers | None

    def complete(self, tp: int) -> Model:
        """The first model of a stage that has all param groups."""
        stages = zip(self.models[::tp], self.shards[::tp], strict=True)
        found = (model for model, shards in stages if None not in shards[0].masters)
        return next(found, self.models[0])


class _Opening:
    """One call of `DeepSpeedFormat.open`."""

    def __init__(
        self, files: Files, found: RankFiles, patterns: Patterns, rank: int | None
    ) -> None:
        self._patterns = patterns
        self._rank = rank
        self._files = files
        self._found = found
        self._table: dict[str, int] = {}
        self._warnings: list[str] = []
        self._tp = found.mp

    def source(self) -> PieceSource:
        ranks = self._read()
        first = ranks.models[0]
        stage = ranks.shards[0][0].stage
        tp = self._tensor_parallel(ranks)
        census = take_census(first, stage) if ranks.layers is None else ranks.layers.census
        self._warnings += census.warnings
        models = self._all_models(ranks, needed=bool(census.frozen) and stage == 3)
        assembly = Assembly(tp, census, file_of=self._file_of)
        assembly.add_trainable(ranks.units, ranks.shards, self._tp)
        if not assembly.stepped and ranks.shards[0][0].masters:
            self._warnings.append(
                "the optimizer has no states yet (it never took a step): there are master weights only."
            )
        for replicas in [[ranks.models]] if ranks.layers is None else ranks.layers.replicas:
            assembly.add_modules(replicas, stage)
        assembly.add_frozen(models, stage)
        for units, shards in zip(ranks.units, ranks.shards, strict=True):
            self._warnings += compare_mappings(units, shards)
        common = collect_common(
            self._files,
            {_label(mp, dp, self._found.partitioned): model for (mp, dp), model in models.items()},
            [
                (shards[0], units)
                for shards, units in zip(
                    ranks.shards[:: self._tp], ranks.units[:: self._tp], strict=True
                )
            ],
            layers=() if ranks.layers is None else ranks.layers.firsts,
            complete=ranks.complete(self._tp),
            file_of=self._file_of,
        )
        if ranks.layers is not None:
            facts = ranks.layers.facts(ranks.models[:: self._tp])
            common.document["framework"]["pipeline"] = facts
        self._warnings += [*compare_steps(common.document["steps"], first), *tp.warnings()]
        rules, padded = tp.patterns(), tp.padded()
        document = {**common.document, **({"patterns": rules.to_json()} if rules else {})}
        return PieceSource(
            format=DeepSpeedFormat.name,
            files=self._files,
            file_table=self._file_table(),
            parameters=assembly.parameters(
                order=first.module if ranks.layers is None else ranks.layers.names
            ),
            common=CommonState(document, common.tensors.specs),
            parallelism={**self._parallelism(ranks), **({"padded": padded} if padded else {})},
            warnings=[*dict.fromkeys(self._warnings + assembly.warnings + common.warnings)],
            bound={**assembly.bound, **common.tensors.bound},
        )

    def _tensor_parallel(self, ranks: _Ranks) -> TensorParallel | OneRank:
        first = ranks.models[0]
        info = first.rest.get("universal_checkpoint_info") or ranks.shards[0][0].patterns
        rules = TensorParallel(info, self._tp, patterns=self._patterns, client=first.client)
        return rules if self._rank is None else OneRank(self._rank, self._tp, rules)

    def _read(self) -> _Ranks:
        """Read the first model file per model-parallel rank and all optimizer files."""
        model = self._model(self._found.models[0, 0])
        self._check_topology(model)
        found = self._found
        models = [
            model,
            *self._map(lambda mp: self._model(found.models[mp, 0]), range(1, found.mp)),
        ]
        for mp, other in enumerate(models):
            require_one_run(model, other, same_shapes=False, same_names=False)
            stage = models[mp - mp % self._tp]
            require_one_run(stage, other, same_shapes=False)
        if model.stage0 and found.layers:
            return self._read_stages(models)
        if model.stage0:
            return self._read_stage0(models)
        if not found.optims:
            raise _without_optimizer(found, model)
        first = self._shard(found.optims[0, 0])
        require_one_config(model.name, model.rest, first.name, first.root)
        dp = max(first.counts, default=1)
        rank_files.require_ranks(found, mp=found.mp, dp=dp)
        if found.dp > dp:
            self._left_over(dp, found.dp, "data-parallel")
        others = [(mp, d) for mp in range(found.mp) for d in range(dp)][1:]
        rest = self._map(lambda rank: self._shard(found.optims[rank], first), others)
        flat = [first, *rest]
        shards = [flat[mp * dp : (mp + 1) * dp] for mp in range(found.mp)]
        if self._tp < found.mp:
            models, shards = align_groups(models, shards)
            first, *rest = [shard for group in shards for shard in group]
        steps = read_steps(self._files, first)
        self._map(lambda shard: self._require_one_save(first, steps, shard), rest)
        for shard in rest:
            _require_same(first, shard, ("stage", "optimizer_class"))
            if first.stage == shard.stage == 3 and len(first.counts) != len(shard.counts):
                raise _other_sub_groups(first, shard)
            _require_same(first, shard, ("counts", "group_units"))
        for group in shards:
            for shard in group:  # uneven slices of tensor-parallel ranks are padded differently
                _require_same(group[0], shard, ("pads",))
        if (first.stage == 3) != found.partitioned:
            raise CorruptSourceError(
                f"{first.name} is of ZeRO stage {first.stage}, but {model.name} is not: the files do not belong"
                " together."
            )
        layers = None
        if self._found.layers:
            layers = self._layers(models, shards)
            models = fill_shapes(models, shards, layers)
            require_stages(models, self._tp)
        units = [_units(model, group) for model, group in zip(models, shards, strict=True)]
        return _Ranks(models, shards, units, layers)

    def _layers(self, models: Sequence[Model], shards: Sequence[Sequence[Shard]]) -> Layers:
        """Read the layer files of a pipeline."""
        return read_layers(self._found, self._layer_files(), models, shards)

    def _layer_files(self) -> dict[tuple[int, int], TorchFile]:
        stats = self._found.layers
        read = self._map(
            lambda key: require_own_rank(index(self._files, stats[key].name)), sorted(stats)
        )
        return dict(zip(sorted(stats), read, strict=True))

    def _read_stage0(self, models: Sequence[Model]) -> _Ranks:
        """Without ZeRO there are model files only, one per model-parallel rank."""
        names = self._names(models[0])
        if names.tied:
            raise PatternError(
                f"{NAMES_FILE} names tied modules, but there are no layer files of a pipeline."
            )
        return self._together(
            read_stage0(model, names.groups, self._prober(model)) for model in models
        )

    def _read_stages(self, models: Sequence[Model]) -> _Ranks:
        """The same of a pipeline, with layer files beside."""
        names = self._names(models[0])
        files = self._layer_files()
        read, prefixes = read_stages(
            self._found, files, models=models, names=names, probe=self._prober
        )
        ranks = self._together(read)
        ranks.layers = read_layers(
            self._found, files, ranks.models, ranks.shards, prefixes=prefixes
        )
        require_stages(ranks.models, self._tp)
        return ranks

    def _names(self, model: Model) -> Names:
        """The parameters' names, if somebody wrote them; nothing else may lie beside the model files."""
        found = self._found
        if found.optims or found.partitioned:
            others = found.optims or found.models
            raise UnsupportedSourceError(
                f"{model.name}: no param_shapes, as of ZeRO stage 0, but {len(others)} rank files such as"
                f" {next(iter(others.values())).name} are there, expected none: such checkpoints are not supported."
            )
        return read_names(self._files, found.folder)

    def _prober(self, model: Model) -> Prober:
        return Prober(self._files, model.name, model.big_endian, self._map)

    def _together(self, read: Iterable[Stage0]) -> _Ranks:
        """Model-parallel ranks without ZeRO, which must be of one save."""
        ranks = _Ranks([], [], [], None)
        steps: Mapping[int, Any] = {}
        for rank in read:
            if not ranks.shards:
                steps = read_steps(self._files, rank.shard)
            else:
                mine = read_steps(self._files, rank.shard)
                require_one_save(ranks.shards[0][0], rank.shard, like=steps, steps=mine)
                _require_same(ranks.shards[0][0], rank.shard, ("optimizer_class", "group_units"))
            ranks.models.append(rank.model)
            ranks.shards.append([rank.shard])
            ranks.units.append(list(rank.units))
            self._warnings += rank.warnings
        return ranks

    def _left_over(self, ranks: int, found: int, what: str) -> None:
        self._warnings.append(
            f"the checkpoint was saved by {ranks} {what} ranks; the files of ranks {ranks} to {found - 1} are left"
            " over from another run and were ignored."
        )

    def _all_models(self, ranks: _Ranks, *, needed: bool) -> dict[tuple[int, int], Model]:
        """Model files whose values may differ by rank.

        At stage 3 every data-parallel rank has one; those beyond the first are only read where they
        hold parts of frozen parameters or the client's state, and one of them to compare.
        """
        models = {(mp, 0): model for mp, model in enumerate(ranks.models)}
        dp = len(ranks.shards[0])
        keys = [(mp, d) for mp in range(self._found.mp) for d in range(1, dp)]
        if self._found.partitioned and (needed or ranks.models[0].client):
            read = self._map(lambda rank: self._model_like(ranks.models[rank[0]], rank), keys)
            models.update(zip(keys, read, strict=True))
        elif self._found.partitioned and keys:  # one witness that the first file is no stray
            self._model_like(ranks.models[keys[-1][0]], keys[-1])
        for model in models.values():
            self._file_of(model.name)
        return dict(sorted(models.items()))

    def _check_topology(self, model: Model) -> None:
        """Compare what the first model file says about the run with the files that are there."""
        dimensions = model.rest.get("checkpoint_parallel_dimensions") or {}
        zero = _zero_config(model)
        if zero.get("zero_quantized_nontrainable_weights") and model.fragments:
            raise UnsupportedSourceError(
                f"{model.name}: frozen parameters were quantized (zero_quantized_nontrainable_weights); they cannot"
                " be read exactly."
            )
        if zero.get("zenflow"):
            self._warnings.append(
                "ZenFlow was on: DeepSpeed does not save the states of its selective optimizer."
            )
        config = model.rest.get("ds_config")
        config = config if isinstance(config, Mapping) else {}
        degree = config.get("sequence_parallel_size")
        if "data_parallel_size" in config and isinstance(degree, int) and degree > 1:
            self._warnings.append(
                f"the run had data_parallel_size and sequence_parallel_size {degree} in its configuration: there"
                " DeepSpeed lets the sequence-parallel ranks write the same files, and the last one wins. What is"
                " read is right only if these ranks had the same weights."
            )
        world = model.rest.get("mp_world_size")
        if isinstance(world, int) and world >= 1 and world != self._found.mp:
            if world > self._found.mp:
                rank_files.require_ranks(self._found, mp=world, dp=self._found.dp)
            self._left_over(world, self._found.mp, "model-parallel")
            self._found = replace(self._found, mp=world)
        self._tp = self._tensor_degree(model, dimensions if isinstance(dimensions, Mapping) else {})
        if self._found.layers:
            rank_files.require_layers(self._found, self._tp)

    def _tensor_degree(self, model: Model, dimensions: Mapping[str, Any]) -> int:
        """Tensor-parallel ranks of every pipeline stage; before 2026 only the layer files tell."""
        mp = self._found.mp
        ranks = 1 + max((rank for _, rank in self._found.layers), default=mp - 1)
        tensor, pipeline = dimensions.get("tp_degree"), dimensions.get("pp_degree")
        tensor = tensor if isinstance(tensor, int) and tensor > 0 else ranks
        pipeline = pipeline if isinstance(pipeline, int) and pipeline > 0 else mp // tensor
        sequence = tensor > mp == 1 == pipeline == model.rest.get("mp_world_size")
        if sequence and "universal_checkpoint_info" not in model.rest:
            # The mpu of DeepSpeed's sequence parallelism (runtime/sequence_parallel/parallel_state_sp.py)
            # answers with its own degree when it is asked for the model-parallel one.
            self._warnings.append(
                f"tp_degree {tensor} with one model-parallel rank is read as sequence parallelism, which cuts no"
                " weights."
            )
            return 1
        if tensor * pipeline != mp or (pipeline > 1 and not self._found.layers):
            raise CorruptSourceError(
                f"{model.name}: {pipeline} pipeline stages (pp_degree) of {tensor} tensor-parallel ranks (tp_degree)"
                f" contradict {mp} model-parallel ranks with {len(self._found.layers)} layer files."
            )
        return tensor

    def _parallelism(self, ranks: _Ranks) -> dict[str, Any]:
        shard = ranks.shards[0][0]
        model = ranks.models[0]
        dp = len(ranks.shards[0])
        if model.stage0 and isinstance(model.rest.get("dp_world_size"), int):
            dp = model.rest["dp_world_size"]
        return {
            "framework": DeepSpeedFormat.name,
            "version": model.rest.get("ds_version") or shard.rest.get("ds_version"),
            "zero_stage": shard.stage,
            "dp": dp,
            "tp": self._tp,
            "pp": self._found.mp // self._tp,
            "optimizer_class": shard.optimizer_class,
            "tag": self._found.tag,
            "file_prefix": self._found.prefix,
            "dp_world_size": model.rest.get("dp_world_size"),
            "mp_world_size": model.rest.get("mp_world_size"),
        }

    def _model(self, stat: FileStat) -> Model:
        file = require_own_rank(index(self._files, stat.name))
        return read_model(file, pipeline=bool(self._found.layers))

    def _model_like(self, first: Model, rank: tuple[int, int]) -> Model:
        """Another data-parallel rank's model file, without what it has in common with the first."""
        model = self._model(self._found.models[rank])
        require_one_run(first, model, same_shapes=True)
        return model.without_module()

    def _shard(self, stat: FileStat, like: Shard | None = None) -> Shard:
        return read_shard(require_own_rank(index(self._files, stat.name)), like=like)

    def _require_one_save(self, first: Shard, steps: Mapping[int, Any], shard: Shard) -> None:
        """Another rank's optimizer file must be of the same save as the first."""
        require_one_save(first, shard, like=steps, steps=read_steps(self._files, shard))

    def _map(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """Run over independent files in threads; the first error in order of the items is raised."""
        if len(items) < 2:
            return [function(item) for item in items]
        threads = _LOCAL_THREADS if self._files.is_local else _REMOTE_THREADS
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(function, items))

    def _file_table(self) -> list[SourceFile]:
        found = self._found
        grids = (found.models, found.optims, found.layers)
        stats = {stat.name: stat for grid in grids for stat in grid.values()}
        return [SourceFile.of(stats[name]) for name in self._table]

    def _file_of(self, name: str) -> int:
        """Index of a file in the table; a file enters it when something in it is needed."""
        position = self._table.get(name)
        if position is None:
            position = self._table[name] = len(self._table)
        return position


def _zero_config(model: Model) -> Mapping[str, Any]:
    config = model.rest.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return zero if isinstance(zero, Mapping) else {}


def _label(mp: int, dp: int, partitioned: bool) -> str:
    return f"dp_{dp}_mp_{mp}" if partitioned else f"mp_{mp}"


def _units(model: Model, shards: Sequence[Shard]) -> list[Unit]:
    """Lay out the units of one model-parallel rank."""
    shard = shards[0]
    if len(model.shapes) != len(shard.masters):
        raise CorruptSourceError(
            f"{shard.name} has {len(shard.masters)} flat master weights, but param_shapes of {model.name} has"
            f" {len(model.shapes)} groups."
        )
    units: list[Unit] = []
    for position, (shapes, count) in enumerate(zip(model.shapes, shard.counts, strict=True)):
        if count != len(shards):
            raise UnsupportedSourceError(
                f"{shard.name}: group {position} is cut over {count} ranks, others over {len(shards)}: expert"
                " groups are not supported yet."
            )
        if shard.stage == 3:
            units.append(SubGroupUnit.of(shapes, count))
            continue
        pads = None if shard.pads is None else shard.pads[position]
        if pads is not None and len(pads) != len(shapes):
            raise CorruptSourceError(
                f"{shard.name}: param_alignment_paddings of group {position} has {len(pads)} entries, expected one per"
                f" parameter ({len(shapes)})."
            )
        units.append(GroupUnit.of(shapes, count, pads))
    return units


def _require_same(first: Shard, other: Shard, facts: Sequence[str]) -> None:
    """All optimizer files must come from one run."""
    for what in facts:
        mine, theirs = getattr(first, what), getattr(other, what)
        if mine != theirs:
            raise CorruptSourceError(
                f"{other.name} and {first.name} do not belong together: {what} is {theirs!r:.80} and"
                f" {mine!r:.80}."
            )


def _other_sub_groups(first: Shard, other: Shard) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        f"{other.name} has {len(other.counts)} sub-groups, {first.name} has {len(first.counts)}: tensor-parallel"
        " ranks with slices of other sizes close theirs after other parameters, which is not supported yet; or the"
        " files do not belong together.",
        hint="Save with a sub_group_size above the elements that a rank holds.",
    )


def _without_optimizer(found: RankFiles, model: Model) -> IncompleteSourceError:
    world = model.rest.get("dp_world_size")
    ranks = range(world) if isinstance(world, int) and 0 < world <= 100_000 else range(1)
    missing = [found.optim_name(mp, dp) for mp in range(found.mp) for dp in ranks]
    if found.partitioned:
        return IncompleteSourceError(
            f"{model.name} holds ZeRO-3 placeholders, no weights; the weights are in the optimizer files, and none"
            f" of them is there: {listing(missing)}.",
            kind=Kind.PLACEHOLDER,
            missing=missing,
        )
    return IncompleteSourceError(
        f"checkpoint {found.tag!r}: no optimizer file is there: {listing(missing)}; looked in {found.where}.",
        missing=missing,
    )
