"""Merges LoRA adapters into the tensors of a checkpoint, by the names that the checkpoint has, before a family reads them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from kvjax.models.adapter_files import Adapter, Scales
from kvjax.models.checkpoint import listed
from kvjax.models.family import TENSORS, Family
from kvjax.models.merged import Added, Change, LowRank, LowRankTable, Merged, Replaced
from kvjax.models.tensors import DTYPES, RowsPacked, Stored, Tensor

logger = logging.getLogger(__name__)

_PACKED = ("qweight", "weight_packed")
"""Tensors that a packed matrix has in the place of its weight."""

_EMBED, _HEAD = TENSORS["embed"], TENSORS["lm_head"]


def merge(
    adapters: Sequence[Adapter], tensors: Mapping[str, Tensor], family: Family, *, tied: bool, repacked: bool
) -> tuple[dict[str, Tensor], bool]:
    """A checkpoint's tensors with adapters merged into them, in order, and whether embedding and head are still the same matrix.

    tensors: by their names in the file. tied: whether config.json says that embedding and head are one matrix. An adapter of one of them
    makes them two, as while it was trained. repacked: whether matrices that could stay packed as they are stored are widened and packed
    anew. An adapter that is named twice counts twice. Reads no numbers. ValueError for a tensor of an adapter that has no place in the
    model, does not fit, or belongs to a matrix that stays packed.
    """
    place = _Places(tensors, family, repacked)
    for adapter in adapters:
        if tied and (place.changes(adapter, _EMBED) or place.changes(adapter, _HEAD)):
            place.untie(adapter)
            tied = False
        place.merge(adapter)
    return place.tensors, tied


class _Places:
    """The tensors of a checkpoint, and where an adapter's belong."""

    def __init__(self, tensors: Mapping[str, Tensor], family: Family, repacked: bool) -> None:
        self.tensors, self._base, self._family, self._repacked = dict(tensors), dict(tensors), family, repacked
        self._names = {own: name for name in tensors if (own := family.own_name(name)) is not None}

    def changes(self, adapter: Adapter, own: str) -> bool:
        """Whether an adapter changes a tensor apart from the one that it is tied to. own: its name in the family's checkpoints."""
        names = {f"{module}.weight" for module in adapter.modules} | {name for name in adapter.whole if adapter.is_trained(name)}
        return own in {self._family.own_name(name) for name in names}

    def untie(self, adapter: Adapter) -> None:
        """Give embedding and head a tensor each. A copy of one that comes with the adapter stood in the place of both."""
        copies = self._named(adapter.below)
        copy = copies.get(_EMBED) or copies.get(_HEAD)
        for own, other in ((_EMBED, _HEAD), (_HEAD, _EMBED)):
            if own not in self._names and other in self._names:
                self._names[own] = own
                self.tensors[own], self._base[own] = self.tensors[self._names[other]], self._base[self._names[other]]
        for own in (_EMBED, _HEAD):
            if copy is not None and own in self._names:
                self._rebase(adapter, own, copy)
        logger.warning(
            "%s changes the embedding or the head, which are one matrix in the model: not tied, as in peft while it was trained",
            adapter.folder,
        )

    def merge(self, adapter: Adapter) -> None:
        """Change the tensors that an adapter adapts or replaces."""
        self._check_places(adapter)
        for own, stored in self._named(adapter.below).items():
            self._rebase(adapter, own, stored)
        for own, stored in self._named(adapter.whole).items():
            self._replace(adapter, own, stored)
        scales = Scales(adapter)
        for module, parts in adapter.modules.items():
            own = self._family.own_name(f"{module}.weight")
            if own is not None:
                self._adapt(adapter, own, parts, *scales.of(module))

    def _named(self, whole: Mapping[str, Stored]) -> dict[str, Stored]:
        """Tensors of an adapter by their names in the family's checkpoints, without those of parts that are not read."""
        return {own: stored for name, stored in whole.items() if (own := self._family.own_name(name)) is not None}

    def _check_places(self, adapter: Adapter) -> None:
        """ValueError if the model has no tensor for one of an adapter's, or a packed one."""
        names = [f"{module}.weight" for module in adapter.modules]
        names += [f"{module}.bias" for module, parts in adapter.modules.items() if "lora_B.bias" in parts]
        owns = {own for name in (*names, *adapter.whole, *adapter.below) if (own := self._family.own_name(name)) is not None}
        missing = sorted(owns - self._names.keys())
        for own in sorted(owns):
            stored = self._packing(own)
            if stored is not None:
                raise ValueError(
                    f"{adapter.folder} adapts {own:.200}, which the model holds packed ({stored}), and an adapter cannot be merged into "
                    "packed weights: load the checkpoint that it was quantized from with this adapter, and weights='int8' or 'int4' if it "
                    "should be small"
                )
        if missing:
            raise ValueError(
                f"{adapter.folder} holds tensors that have no place in the model: {listed(missing, 5)}; it was made for {adapter.base}"
            )
        if not owns:
            raise ValueError(f"{adapter.folder} adapts parts of the model that are not read; it was made for {adapter.base}")

    def _check_packing(self, adapter: Adapter, own: str) -> None:
        """ValueError if a matrix stays packed as the file holds it."""
        tensor = self._base[self._names[own]]
        if not self._repacked and isinstance(tensor, RowsPacked) and tensor.format is not None:
            raise ValueError(
                f"{adapter.folder} adapts {own:.200}, which stays packed as the file holds it ({tensor.format.codes}): give weights='int8' "
                "or 'int4' (--weights int8), which packs the sum anew"
            )

    def _packing(self, own: str) -> str | None:
        """The type or the tensors of a packed matrix; None if a tensor is not packed, or not there."""
        if own in self._names:
            stored = self.tensors[self._names[own]].dtype
            return None if stored in DTYPES else stored
        module = own.removesuffix(".weight")
        beside = [name for name in _PACKED if f"{module}.{name}" in self._names]
        return ", ".join(beside) or None

    def _rebase(self, adapter: Adapter, own: str, stored: Stored) -> None:
        """Put a copy in the place of a tensor, below the changes that earlier adapters made."""
        name = self._names[own]
        self._check(adapter, stored, self.tensors[name].shape, own)
        base, tensor = Replaced(self._base[name], stored), self.tensors[name]
        self._base[name] = self.tensors[name] = base
        for change in tensor.changes if isinstance(tensor, Merged) else ():
            self._add(name, dataclasses.replace(change, base=base))

    def _replace(self, adapter: Adapter, own: str, stored: Stored) -> None:
        """Put a tensor in the place of another and what earlier adapters made of it."""
        name = self._names[own]
        self._check(adapter, stored, self.tensors[name].shape, own)
        if adapter.scale != 1:
            raise ValueError(
                f"{adapter.folder} replaces {own:.200} as a whole (modules_to_save or bias), which has no scale: leave the scale "
                f"{adapter.scale:g} out"
            )
        self.tensors[name] = self._base[name] = Replaced(self._base[name], stored)

    def _adapt(self, adapter: Adapter, own: str, parts: Mapping[str, Stored], rank: int, scale: float) -> None:
        name, table = self._names[own], "lora_embedding_A" in parts
        self._check_packing(adapter, own)
        base, magnitude = self._base[name], parts.get("lora_magnitude_vector")
        a, b = (parts[f"lora_embedding_{which}" if table else f"lora_{which}.weight"] for which in "AB")
        if table != (own == _EMBED):
            raise ValueError(f"{adapter.folder} adapts {own:.200} as {'an embedding' if table else 'a matrix'}, which it is not")
        if len(base.shape) != 2:
            raise ValueError(f"{adapter.folder} adapts {own:.200}, which is {list(base.shape)}; matrices alone can be adapted")
        features, inputs = base.shape[::-1] if table else base.shape
        self._check(adapter, a, (rank, inputs), own)
        self._check(adapter, b, (features, rank), own)
        if (magnitude is not None) != bool(adapter.fields.get("use_dora")):
            said = "without magnitudes" if magnitude is None else "with magnitudes"
            raise ValueError(
                f"{adapter.folder}: {own:.200} comes {said}, and use_dora is {adapter.fields.get('use_dora', False)}: download it again"
            )
        if magnitude is not None:
            self._check(adapter, magnitude, (features,), own)
        self._add(name, (LowRankTable if table else LowRank)(base, b, a, scale, magnitude))
        if (bias := parts.get("lora_B.bias")) is not None:
            of_bias = self._names[f"{own.removesuffix('.weight')}.bias"]
            self._check(adapter, bias, self.tensors[of_bias].shape, own)
            self._add(of_bias, Added(bias, scale))

    def _add(self, name: str, change: Change) -> None:
        """One more change of a tensor."""
        tensor = self.tensors[name]
        before = tensor.changes if isinstance(tensor, Merged) else ()
        self.tensors[name] = Merged(self._base[name], (*before, change))

    def _check(self, adapter: Adapter, stored: Stored, shape: tuple[int, ...], own: str) -> None:
        """ValueError unless a tensor of an adapter has the shape that its place needs."""
        if stored.shape != shape:
            raise ValueError(
                f"{stored.file}: {stored.name:.200} is {list(stored.shape)}, must be {list(shape)} for {own:.200} of this model and the "
                f"ranks of adapter_config.json; it was made for {adapter.base}"
            )
