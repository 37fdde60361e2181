"""Merges LoRA adapters into the tensors of a checkpoint, by their names in the family's own checkpoints, before fused
ones are cut."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from kvjax.models.adapter_files import MERGE_ELSEWHERE, Adapter, Scales
from kvjax.models.checkpoint import listed
from kvjax.models.family import TENSORS, Family
from kvjax.models.merged import Added, Change, LowRank, LowRankTable, Merged, Replaced
from kvjax.models.tensors import DTYPES, RowsPacked, Stored, Tensor

logger = logging.getLogger(__name__)

_EMBED, _HEAD = TENSORS["embed"], TENSORS["lm_head"]


def merge(
    adapters: Sequence[Adapter], tensors: Mapping[str, Tensor], packed: Mapping[str, object], family: Family, tied: bool
) -> tuple[dict[str, Tensor], bool]:
    """A checkpoint's tensors with adapters merged into them, in order, and whether embedding and head are still the
    same matrix.

    An adapter of the embedding or the head makes them two, as while it was trained. An adapter that is named twice
    counts twice. Reads no numbers. ValueError for a tensor of an adapter that has no place in the model, does not fit,
    or belongs to a matrix that stays packed.

    Args:
        adapters: `open_adapters`.
        tensors: those that are not packed, or are widened when they are read, by their names in the family's own
            checkpoints.
        packed: the matrices that stay packed as they are stored, by these names; those of a GGUF file are `RowsPacked`.
        family: whose names they are.
        tied: whether embedding and head are one matrix, in the place of the embedding.
    """
    place = _Places(tensors, packed, family)
    for adapter in adapters:
        if tied and (place.changes(adapter, _EMBED) or place.changes(adapter, _HEAD)):
            place.untie(adapter)
            tied = False
        place.merge(adapter)
    return place.tensors, tied


class _Places:
    """The tensors of a checkpoint, and where an adapter's belong. All names are those of the family's own
    checkpoints."""

    def __init__(self, tensors: Mapping[str, Tensor], packed: Mapping[str, object], family: Family) -> None:
        self.tensors, self._base, self._packed, self._family = dict(tensors), dict(tensors), packed, family

    def changes(self, adapter: Adapter, name: str) -> bool:
        """Whether an adapter changes a tensor apart from the one that it is tied to."""
        names = {f"{module}.weight" for module in adapter.modules} | {name for name in adapter.whole if adapter.is_trained(name)}
        return name in {self._family.own_name(each) for each in names}

    def untie(self, adapter: Adapter) -> None:
        """Give embedding and head a tensor each. A copy of one that comes with the adapter stood in the place of
        both."""
        self._check_unpacked(adapter, _EMBED)
        if _EMBED not in self.tensors:  # which is said when all tensors are checked
            return
        self.tensors[_HEAD], self._base[_HEAD] = self.tensors[_EMBED], self._base[_EMBED]
        copies = self._named(adapter.below)
        copy = copies.get(_EMBED) or copies.get(_HEAD)
        for name in (_EMBED, _HEAD) if copy is not None else ():
            self._rebase(adapter, name, copy)
        logger.warning(
            "%s changes the embedding or the head, which are one matrix in the model: not tied, as in peft while it was trained",
            adapter.folder,
        )

    def merge(self, adapter: Adapter) -> None:
        """Change the tensors that an adapter adapts or replaces."""
        self._check_places(adapter)
        for name, stored in self._named(adapter.below).items():
            self._rebase(adapter, name, stored)
        for name, stored in self._named(adapter.whole).items():
            self._replace(adapter, name, stored)
        scales = Scales(adapter)
        for module, parts in adapter.modules.items():
            name = self._family.own_name(f"{module}.weight")
            if name is not None:
                self._adapt(adapter, name, parts, *scales.of(module))

    def _named(self, whole: Mapping[str, Stored]) -> dict[str, Stored]:
        """Tensors of an adapter by their names in the family's checkpoints, without those of parts that are not
        read."""
        return {own: stored for name, stored in whole.items() if (own := self._family.own_name(name)) is not None}

    def _check_places(self, adapter: Adapter) -> None:
        """ValueError if the model has no tensor for one of an adapter's, or a packed one."""
        names = [f"{module}.weight" for module in adapter.modules]
        names += [f"{module}.bias" for module, parts in adapter.modules.items() if "lora_B.bias" in parts]
        owns = {own for name in (*names, *adapter.whole, *adapter.below) if (own := self._family.own_name(name)) is not None}
        for name in sorted(owns):
            self._check_unpacked(adapter, name)
        biases = {own for own in owns if own.endswith(".bias")}
        if biases and not biases & self.tensors.keys() and owns - biases <= self.tensors.keys():
            raise ValueError(
                f"{adapter.folder} adds biases (lora_bias or bias) to matrices that have none in this model: {MERGE_ELSEWHERE}"
            )
        if missing := sorted(owns - self.tensors.keys()):
            raise ValueError(
                f"{adapter.folder} holds tensors that have no place in the model: {listed(missing, 5)}; it was made for {adapter.base}"
            )
        if not owns:
            raise ValueError(f"{adapter.folder} adapts parts of the model that are not read; it was made for {adapter.base}")

    def _check_unpacked(self, adapter: Adapter, name: str) -> None:
        """ValueError, with the remedy, for a matrix that stays packed."""
        packed, tensor = self._packed.get(name), self.tensors.get(name)
        if packed is None and (tensor is None or tensor.dtype in DTYPES):
            return
        said = (
            f"{adapter.folder} adapts {name:.200}, which stays packed as it is stored, and an adapter cannot be merged into packed weights"
        )
        if isinstance(packed, RowsPacked):
            raise ValueError(f"{said}: give weights='int8' or 'int4' (--weights int8), which packs the sum anew")
        raise ValueError(
            f"{said}: load the checkpoint that it was quantized from with this adapter, and weights='int8' or 'int4' if it should be small"
        )

    def _rebase(self, adapter: Adapter, name: str, stored: Stored) -> None:
        """Put a copy in the place of a tensor, below the changes that earlier adapters made."""
        self._check(adapter, stored, self.tensors[name].shape, name)
        base, tensor = Replaced(self._base[name], stored), self.tensors[name]
        self._base[name] = self.tensors[name] = base
        for change in tensor.changes if isinstance(tensor, Merged) else ():
            self._add(name, dataclasses.replace(change, base=base))

    def _replace(self, adapter: Adapter, name: str, stored: Stored) -> None:
        """Put a tensor in the place of another and what earlier adapters made of it."""
        self._check(adapter, stored, self.tensors[name].shape, name)
        if adapter.scale != 1:
            raise ValueError(
                f"{adapter.folder} replaces {name:.200} as a whole (modules_to_save or bias), which has no scale: leave the scale "
                f"{adapter.scale:g} out"
            )
        self.tensors[name] = self._base[name] = Replaced(self._base[name], stored)

    def _adapt(self, adapter: Adapter, name: str, parts: Mapping[str, Stored], rank: int, scale: float) -> None:
        table, base, magnitude = "lora_embedding_A" in parts, self._base[name], parts.get("lora_magnitude_vector")
        a, b = (parts[f"lora_embedding_{which}" if table else f"lora_{which}.weight"] for which in "AB")
        if table != (name == _EMBED):
            raise ValueError(f"{adapter.folder} adapts {name:.200} as {'an embedding' if table else 'a matrix'}, which it is not")
        if len(base.shape) != 2:
            raise ValueError(f"{adapter.folder} adapts {name:.200}, which is {list(base.shape)}; matrices alone can be adapted")
        features, inputs = base.shape[::-1] if table else base.shape
        ranks = f" and the rank {rank} of adapter_config.json"
        self._check(adapter, a, (rank, inputs), name, ranks)
        self._check(adapter, b, (features, rank), name, ranks)
        if (magnitude is not None) != bool(adapter.fields.get("use_dora")):
            said = "without magnitudes" if magnitude is None else "with magnitudes"
            raise ValueError(
                f"{adapter.folder}: {name:.200} comes {said}, and use_dora is {adapter.fields.get('use_dora', False)}: download it again"
            )
        if magnitude is not None:
            self._check(adapter, magnitude, (features,), name)
        self._add(name, (LowRankTable if table else LowRank)(base, b, a, scale, magnitude))
        if (bias := parts.get("lora_B.bias")) is not None:
            of_bias = f"{name.removesuffix('.weight')}.bias"
            self._check(adapter, bias, self.tensors[of_bias].shape, name)
            self._add(of_bias, Added(bias, scale))

    def _add(self, name: str, change: Change) -> None:
        """One more change of a tensor."""
        tensor = self.tensors[name]
        before = tensor.changes if isinstance(tensor, Merged) else ()
        self.tensors[name] = Merged(self._base[name], (*before, change))

    def _check(self, adapter: Adapter, stored: Stored, shape: tuple[int, ...], name: str, ranks: str = "") -> None:
        """ValueError unless a tensor of an adapter has the shape that its place needs. ranks: what else the shape
        follows from."""
        if stored.shape != shape:
            raise ValueError(
                f"{stored.file}: {stored.name:.200} is {list(stored.shape)}, must be {list(shape)} for {name:.200} of this model{ranks}; "
                f"the adapter was made for {adapter.base}"
            )
