"""The prefill-policy protocol: the chunk's keys and values are written first, then the policy attends to pages."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import flax.struct
from jaxtyping import Array, Float, Int

from kvjax.axes import ONE_DEVICE, Shards
from kvjax.cache.arrays import PagedKV
from kvjax.cache.index_spec import IndexSpec
from kvjax.model.layers import Rope
from kvjax.policies.decode.base import IndexerQuery
from pallas_kernels.core.soft_cap import Scale


@flax.struct.dataclass
class PrefillContext:
    """The place of a chunk: query t of row b is token starts[b] + t; lengths include the chunk's tokens. sm_scale:
    scale of logits. indexer: None in models without a lightning indexer.

    Queries at or past lengths are padding: their outputs are not used, and they must not influence the others. layer:
    its number among those that attend to pages. It is an array, because slices of equal layers run one program: use
    `jax.lax.cond`, not `if`.

    page_table: page ids; use them for rows of an index. frames: where the bytes of these pages are; use them for ops
    that read keys. rope: how queries and keys were rotated; None in layers of latent attention.
    """

    page_table: Int[Array, "B M"]
    starts: Int[Array, "B"]
    lengths: Int[Array, "B"]
    layer: int | Int[Array, ""]
    sm_scale: Scale = flax.struct.field(pytree_node=False)
    indexer: IndexerQuery | None = None
    frame_table: Int[Array, "B M"] | None = None
    """Frames, where they are not the page ids."""
    rope: Rope | None = flax.struct.field(pytree_node=False, default=None)
    shards: Shards = flax.struct.field(pytree_node=False, default=ONE_DEVICE)
    """The devices over which heads are split. Pages of other devices have been brought here."""
    kv_replicas: int = flax.struct.field(pytree_node=False, default=1)
    """Devices of the mesh that have the same KV heads."""
    fresh: Int[Array, "B"] | None = None
    """The first token that the chunk writes, as `flash_attention` takes it: outputs of earlier queries are not used.
    None: they may be."""

    @property
    def frames(self) -> Int[Array, "B M"]:
        """Logical page -> frame, -1 where there is none."""
        return self.page_table if self.frame_table is None else self.frame_table


@runtime_checkable
class PrefillPolicy(Protocol):
    """A frozen dataclass: static, hashable, holds no arrays. It may define `indexes` (`indexes_of`), `query_tile`
    (`query_tile_of`), and `reads_packed`: True where it reads keys and values only through ops that take `Pages`, and
    so can run over packed ones."""

    @property
    def queries_stand_alone(self) -> bool:
        """Whether a query's output is independent of the chunk's other queries. If not, a call that begins in the
        middle of a chunk prefills the rest of it densely, because the chunk's first queries are gone."""
        ...

    def attend(self, query: Float[Array, "B T H D"], layer: PagedKV, ctx: PrefillContext) -> Float[Array, "B T H D"]:
        """Attention of a chunk of queries over the pages, the chunk's own included."""
        ...

    def describe(self) -> str:
        """The policy and what it reads, for reports."""
        ...


def indexes_of(policy: PrefillPolicy) -> tuple[IndexSpec, ...]:
    """Indexes that sealing a page must build for a prefill policy: those of its `indexes()`, or none."""
    return policy.indexes() if hasattr(policy, "indexes") else ()


def query_tile_of(policy: PrefillPolicy) -> int | None:
    """How many queries, from a multiple of their number on, a policy looks at together: each device of a mesh may
    attend for some of a chunk's tiles. None, unless the class that attends or lists says so itself: the whole chunk. A
    subclass may look further."""
    kinds = [vars(kind) for kind in type(policy).__mro__]
    says = next((number for number, names in enumerate(kinds) if "query_tile" in names), len(kinds))
    attends = next((number for number, names in enumerate(kinds) if names.keys() & {"attend", "attend_sparse", "lists"}), -1)
    return policy.query_tile if says <= attends else None
