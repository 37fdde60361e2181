"""What an engine keeps of prefixes, and the digest of everything that bits of pages depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import numpy as np

import kvjax
from kvjax.cache.allocator import OutOfPages
from kvjax.cache.page_manager import PageManager
from kvjax.cache.pool import Pool, first_array
from kvjax.cache.prefix_cache import Prefixes, PrefixStats
from kvjax.cache.spec import MAX_STEP_TOKENS, OPEN
from kvjax.cache.stores.blocks import block_bytes, read_blocks
from kvjax.cache.stores.disk import DiskStore
from kvjax.cache.stores.host import HostStore
from kvjax.checks import check_salt, whole_number
from kvjax.engine.memory import HostMemory
from kvjax.engine.policy_set import PolicySet
from kvjax.engine.sequence import CachedSequence
from kvjax.engine.store_options import Stores
from kvjax.model.identity import fingerprint
from kvjax.model.protocols import Model
from kvjax.policies.prefill import identity
from pallas_kernels.core import dispatch

if TYPE_CHECKING:
    from kvjax.engine.prefill_runner import ChunkRun, Prefiller

logger = logging.getLogger(__name__)


class Reuse:
    """The cache of prefixes of an engine that reuses pages. prefiller: also for a sample of what this engine writes.
    host: what `stores.host_bytes` are. exact: find only pages that a prompt would write itself; else all pages of its
    tokens, however they were written. ValueError for a size of the disk in which no page fits, and for host memory that
    cannot be pinned."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        groups: PageManager,
        declared: PolicySet,
        prefiller: Prefiller,
        stores: Stores,
        host: HostMemory,
    ):
        self.exact = exact = stores.reuse != "any"
        self.model, self._policy_set, self._page_size = model, declared, declared.page_size
        self._pool, self._page_manager, self._prefiller = pool, groups, weakref.proxy(prefiller)
        self._samples: dict[str | None, str] = {}
        # The device of the pool, or the first one of its mesh that this process has: blocks go to stores by way of it.
        devices = first_array(pool.layers).devices() if pool.shards.mesh is None else pool.shards.mesh.local_devices
        self._device: jax.Device = next(iter(devices))
        in_memory = HostStore(host.store_bytes, self._device, host.stored) if host.stored else None
        self._disk: DiskStore | None = None
        if stores.disk is not None:
            sizes = {group.name: block_bytes(groups.spec, group.name) for group in groups.spec.groups if group.name != OPEN}
            self._disk = DiskStore(stores.disk, whole_number("disk_bytes", stores.disk_bytes, 1, 2**63), sizes)
        # Another mesh adds in another order. And its blocks hold heads in another order.
        self._mesh = None if pool.shards.tensor * pool.shards.context == 1 else dict(pool.shards.mesh.shape)
        # Policies whose queries look at each other write the pages of a chunk together.
        alone = declared.prefill.queries_stand_alone
        hash_block = declared.page_size if alone or not exact else declared.prefill_chunk
        self._packed = None if declared.cache_format is None else str(declared.cache_format)
        # Without a disk, no other engine meets these pages.
        self._mark = os.urandom(16).hex() if self._disk is None else fingerprint(model)
        if self._disk is None and in_memory is None and groups.spec.state_groups:
            logger.warning("prompts of this model are found only with host_bytes or disk, which keep the states of its recurrent layers")
        self.prefixes = Prefixes(pool, groups, declared.indexes, hash_block=hash_block, host=in_memory, disk=self._disk)
        prefiller.on_written = self.written

    def adopt(self, sequence: CachedSequence, tokens: Sequence[int], salt: str | None) -> int:
        """Give a sequence without tokens the longest known prefix of `tokens`. Returns its length."""
        check_salt(salt)
        sequence.prefix = self.prefixes.chain(self._root(), salt)
        found = self.prefixes.adopt(sequence, sequence.prefix, tokens, self._how)
        sequence.tokens, sequence.length = list(tokens[:found]), found
        return found

    def written(self, run: ChunkRun) -> None:
        """A chunk of prefill has run all layers: keep its pages, if a new prompt would write them so."""
        sequence, chain = run.sequence, run.sequence.prefix
        if chain is None:
            return
        if self.exact:
            usual = run.whole and run.policy == self._policy_set.prefill_at(run.start)
            if not usual or run.first != chain.length or chain.path != dispatch.forced_path():
                return
        elif len(sequence.tokens) != sequence.length:
            return  # tokens that steps wrote are not known
        self.prefixes.written(sequence, chain, sequence.tokens, self._how)
        self.prefixes.written_state(sequence, chain)

    def freed(self, sequence: CachedSequence) -> None:
        """A sequence is about to give its pages up: keep what steps wrote, unless only what prefill writes counts."""
        if self.exact or sequence.prefix is None or sequence.suspended is not None:
            return
        try:
            self._pool.check()
        except RuntimeError:  # its pages are lost; the next call says so
            return
        # Pages that the latest step filled may not be sealed yet.
        length = min(len(sequence.tokens), sequence.length - MAX_STEP_TOKENS)
        if length > sequence.prefix.length:
            self.prefixes.written(sequence, sequence.prefix, sequence.tokens[:length], self._how)

    def pin(self, prefix: CachedSequence | Sequence[int], salt: str | None) -> int:
        """`Engine.pin`."""
        length = prefix.length if isinstance(prefix, CachedSequence) else len(prefix)
        return self.prefixes.pin(self._digests(prefix, salt), length)

    def pinned(self) -> dict[str, int]:
        """How many pages of each layer group are pinned."""
        return {name: len(pages) for name, pages in self.prefixes.pins.pages.items()}

    def unpin(self, prefix: CachedSequence | Sequence[int], salt: str | None) -> int:
        """`Engine.unpin`."""
        return self.prefixes.pins.remove(self._digests(prefix, salt))

    def _digests(self, prefix: CachedSequence | Sequence[int], salt: str | None) -> list[bytes]:
        check_salt(salt)
        if not isinstance(prefix, CachedSequence):
            return self.prefixes.digests(self.prefixes.chain(self._root(), salt), prefix, self._how)
        if salt is not None:
            raise ValueError("a sequence has the cache_salt that it was made with: leave it out")
        return [] if prefix.prefix is None else prefix.prefix.digests

    def stats(self) -> PrefixStats:
        """What happened so far."""
        return dataclasses.replace(self.prefixes.stats(), exact=self.exact)

    def close(self) -> None:
        """Wait until the disk has everything, and give its folder back."""
        if self._disk is not None:
            self._disk.close()

    def _how(self, position: int) -> str:
        """What writes the hash block that begins at a position in a new prompt; nothing, if that does not matter."""
        if not self.exact:
            return ""
        chunk = self._policy_set.prefill_chunk
        return identity(self._policy_set.prefill_at(position // chunk * chunk))

    def _root(self) -> bytes:
        """Everything that a page's bits depend on, besides tokens and policies; or what it must have in common with
        others at least."""
        if not self.exact:
            common = [kvjax.__version__, self._page_size, self._packed, str(self.model.config.compute_dtype), self._mesh]
            return json.dumps([self._mark, "any", *common]).encode()
        versions = {"kvjax": kvjax.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
        device: dict[str, Any] = {"kind": self._device.device_kind, "platform": self._device.client.platform_version}
        sizes = {"page": self._page_size, "chunk": self._policy_set.prefill_chunk, "dtype": str(self.model.config.compute_dtype)}
        sizes |= {"packed": self._packed, "mesh": self._mesh}
        sample = "" if self._disk is None else self._sample()
        return json.dumps([self._mark, versions, device, sizes, dispatch.forced_path(), sample], sort_keys=True).encode()

    def _sample(self) -> str:
        """A digest of what this engine writes for a fixed text of one chunk. It differs where bits do, whatever the
        reason: the processor's instructions, flags of the compiler, settings of JAX, a change of the code. Where too
        few pages are free for it, a value of its own: then nothing is found on disk, and nobody finds what is kept."""
        path = dispatch.forced_path()
        if path not in self._samples:
            config, spec = self.model.config, self._page_manager.spec
            length = int(min(self._policy_set.prefill_chunk, config.max_positions, self._page_manager.longest))
            tokens = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
            sequence = CachedSequence([], pages=self._page_manager.new())
            try:
                self._page_manager.reserve([sequence], len(tokens))
            except OutOfPages:
                return os.urandom(16).hex()
            try:
                run = self._prefiller.begin(sequence, tokens, self._policy_set.prefill_at(0))
                self._prefiller.advance(run)
                digest = hashlib.sha256(np.asarray(run.x))
                for name, pages in sequence.pages.items():
                    sealed = [page for page in pages[: length // self._page_size] if page >= 0]
                    # A row of state holds what earlier sequences left there, too. The logits follow from it.
                    for block in [] if name in spec.row_groups else read_blocks(self._pool, spec, name, sealed):
                        digest.update(np.asarray(block))
            finally:
                self._page_manager.keep_written(sequence, 0)
            self._samples[path] = digest.hexdigest()
        return self._samples[path]
