"""The slots of a layer's quantized experts, ticked off as tensors are delivered, in however many groups.

    slots = {0..E-1} x {gate_proj, up_proj, down_proj} x {weight, weight_scale}       6 an expert

A slot delivered twice is refused at once, also when the two come in different groups; what is missing, and then what
has no slot, is refused at the end. Every expert of the layer has slots, whichever of them a device keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from muse_jax.checkpoint.names import EXPERT_WEIGHTS, expert_rest, name_list, parse


class ExpertSlots:
    """Which of a layer's slots were delivered.

    layer: only names of its experts are looked at. num_experts: E. parts: the tensors that every projection must have.
    """

    def __init__(self, layer: int, num_experts: int, parts: Iterable[str] = ("weight", "weight_scale")) -> None:
        self._layer = layer
        self._wanted = dict.fromkeys(
            expert_rest(expert, projection, part)
            for expert in range(num_experts)
            for projections in EXPERT_WEIGHTS.values()
            for projection in projections
            for part in parts
        )
        self._seen: dict[str, str] = {}

    def deliver(self, names: Iterable[str], group: str) -> None:
        """Tick off the tensors of one group, such as a file; other tensors' names may be among them.

        Raises ValueError, naming both groups, when a slot was delivered before.
        """
        twice = []
        for full in names:
            name = parse(full)
            if name is None or name.layer != self._layer or name.expert is None:
                continue
            if name.rest in self._seen:
                twice.append(f"{name.rest!r} in {self._seen[name.rest]} and {group}")
            self._seen[name.rest] = group
        if twice:
            raise ValueError(f"layer {self._layer} was given tensors of its experts twice: {name_list(twice)}")

    def check(self) -> None:
        """ValueError when slots are empty, with the first eight and how many, or a tensor has no slot."""
        missing = [rest for rest in self._wanted if rest not in self._seen]
        if missing:
            raise ValueError(
                f"layer {self._layer} has {len(self._wanted) - len(missing)} of {len(self._wanted)} tensors of its "
                f"experts; missing: {name_list(map(repr, missing))}"
            )
        stray = [f"{rest!r} in {group}" for rest, group in self._seen.items() if rest not in self._wanted]
        if stray:
            raise ValueError(f"layer {self._layer} has tensors of experts that belong nowhere: {name_list(stray)}")
