"""What a mapping means for the common state: groups, steps and lists of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ucpstore.errors import Kind
from ucpstore.mapping.resolve import Problem, Resolution
from ucpstore.tagged import decode, encode

__all__ = ["MappedDocument", "map_document"]


class MappedDocument:
    """The common document under the target's names.

    Attributes
    ----------
    document : dict
    problems : list of Problem
    warnings : list of str
    reordered : bool
        The parameters of a group are not one for one those of the source, in its order.
    """

    def __init__(self, document: Mapping[str, Any], resolution: Resolution) -> None:
        self.document = dict(document)
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.reordered = False
        self._made = resolution.made
        self._sources: dict[str, list[str]] = {}
        for one in resolution.made:
            for member in one.members:
                self._sources.setdefault(member, []).append(one.fqn)

    def map_groups(self, order: Sequence[str]) -> None:
        """``param_groups``: a joined parameter takes the place of its first member.

        Members that lie in different groups, or partly in none, are a problem: they have other
        hyper-parameters.
        """
        groups = self.document.get("param_groups")
        if not isinstance(groups, list):
            return
        listed = [list(group.get("params", ())) for group in groups]
        home = {name: index for index, names in enumerate(listed) for name in names}
        for one in self._made:
            places = {member: home.get(member) for member in one.members}
            if len(set(places.values())) > 1:
                words = ", ".join(
                    f"{name!r} in {'no group' if index is None else f'group {index}'}"
                    for name, index in places.items()
                )
                self._report(f"{one.fqn!r} is made of parameters of different groups: {words}")
        rank = {name: index for index, name in enumerate(order)}
        mapped = []
        for index, (group, names) in enumerate(zip(groups, listed, strict=True)):
            targets = [target for name in names for target in self._sources.get(name, ())]
            targets = [*dict.fromkeys(targets)]
            if names and not targets:
                self.warnings.append(f"the mapping leaves parameter group {index} empty.")
            absent = [name for name in targets if name not in rank] if rank else []
            if absent:
                self.problems.append(
                    Problem(Kind.UNMATCHED, f"order does not name {', '.join(map(repr, absent))}")
                )
            elif rank:
                targets.sort(key=rank.__getitem__)
            kept = [self._sources.get(name, []) for name in names]
            self.reordered |= any(len(k) != 1 for k in kept) or [k[0] for k in kept] != targets
            mapped.append({**group, "params": targets, **self._param_names(group, targets)})
        self.document["param_groups"] = mapped

    @staticmethod
    def _param_names(group: Mapping[str, Any], targets: list[str]) -> dict[str, Any]:
        """The names that torch keeps in the group, where the optimizer was given any."""
        return {"param_names": targets} if "param_names" in group else {}

    def map_steps(self) -> None:
        """``steps``: members of one parameter must have one."""
        if "steps" not in self.document:
            return
        steps = decode(self.document["steps"])
        if not isinstance(steps, dict):
            return
        mapped = {}
        for one in self._made:
            found = {member: steps.get(member) for member in one.members}
            if len({repr(step) for step in found.values()}) > 1:
                words = ", ".join(f"{name!r} {step}" for name, step in found.items())
                self._report(f"{one.fqn!r} is made of parameters with different steps: {words}")
            step = next(iter(found.values()))
            if step is not None:
                mapped[one.fqn] = step
        self.document["steps"] = encode(mapped)

    def map_framework(self) -> None:
        """``framework``: the names of buffers, and what describes the source's names by patterns."""
        rules = self.document.pop("patterns", None)
        framework = self.document.get("framework")
        if not isinstance(framework, dict):
            return
        mapped = dict(framework)
        if isinstance(mapped.get("buffer_names"), list):
            targets = [t for name in mapped["buffer_names"] for t in self._sources.get(name, ())]
            mapped["buffer_names"] = sorted(set(targets))
        mapped.pop("pipeline", None)  # layers and tied modules by the names before the mapping
        if mapped.pop("universal_checkpoint_info", None) is not None or rules is not None:
            self.warnings.append(
                "universal_checkpoint_info and rules for tensor-parallel ranks tell of the names before the mapping and"
                " are left out: give rules for the new names where they are needed."
            )
        for key, what in (
            ("module_extras", "entries of the module that are no tensors"),
            ("sparse_tensor_module_names", "names of modules with sparse gradients"),
        ):
            if mapped.get(key):
                self.warnings.append(f"{what} keep the names that they had before the mapping.")
        self.document["framework"] = mapped

    def _report(self, text: str) -> None:
        self.problems.append(Problem(Kind.UNSUPPORTED, text))


def map_document(
    document: Mapping[str, Any], resolution: Resolution, order: Sequence[str]
) -> MappedDocument:
    """The common document of a source, mapped.

    Parameters
    ----------
    document : mapping
        `ucpstore.contracts.CommonState.document`.
    resolution : Resolution
    order : sequence of str
        Of the target's parameters in their groups; empty: as in the source.
    """
    mapped = MappedDocument(document, resolution)
    mapped.map_groups(order)
    mapped.map_steps()
    mapped.map_framework()
    return mapped
