"""How an engine is made: by the commands of `kvjax` in their own process, or by each replica of a batch job over a
cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvjax.axes import mesh, plan_sizes
from kvjax.checks import engine_sizes
from kvjax.engine import PREFILL_CHUNK
from kvjax.engine.engine import Engine
from kvjax.engine.memory import MemoryPlan, memory_plan
from kvjax.engine.policy_set import PolicySet
from kvjax.engine.sampling import Sampling
from kvjax.generation import pages_needed
from kvjax.policies.decode.naming import LOOKUP, policies_of_draft
from kvjax.scheduler.data_parallel import meshes_of, replicas
from kvjax.scheduler.launch_size import StepsPerLaunch
from kvjax.serving.batch.records import Record, request_of
from kvjax.serving.xla_flags import allow_host_pages, allow_pinned
from kvjax.text.token_bounds import LONG, check_text

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.engine.store_options import StoreOptions
    from kvjax.model.protocols import Model
    from kvjax.scheduler.processes import Processes


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model and the arguments of its engine. It can be sent to another process.

    model: folder, hub id or "needle". dtype, weights, lora, max_positions, draft_weights: as in `kvjax.load`.
    slots: sequences decoded together. steps_per_launch, draft: as in `kvjax.Scheduler`. stores: where pages may lie
    besides the device, and whether they are kept. tensor, context: of a mesh (`kvjax.mesh`). data: how many
    engines, each on devices of its own (`kvjax.replicas`). others: more decode policies that the engine can run.
    The rest: as in `Engine`. pages, device_bytes: if both are None, `fitted` says how many pages the pool has.
    left_out: options of the command line that were not typed and have a value by default.
    """

    model: str
    dtype: str | None = None
    max_positions: int | None = None
    policy: str | None = None
    prefill: str | None = None
    slots: int = 8
    steps_per_launch: StepsPerLaunch = "auto"
    draft: str | None = None
    draft_weights: str | None = None
    pages: int | None = None
    page_size: int = 128
    prefill_chunk: int = PREFILL_CHUNK
    device_bytes: int | None = None
    tensor: int = 1
    context: int = 1
    data: int = 1
    stores: StoreOptions = dataclasses.field(default_factory=dict)
    weights: str | None = None
    lora: tuple[str, ...] = ()
    cache_format: str | None = None
    left_out: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def __post_init__(self):
        if self.draft_weights is not None and not policies_of_draft(self.draft):
            said = "given without draft" if self.draft is None else f"given with draft {LOOKUP}, which computes nothing"
            raise ValueError(f"draft_weights {self.draft_weights} was {said}: name a policy that drafts, as draft top:32, or dense")
        if self.draft is not None and self.tensor * self.context * self.data > 1:
            sizes = f"tensor {self.tensor}, context {self.context}, data {self.data}"
            raise ValueError(f"draft {self.draft} is for one device, got {sizes}: leave draft out")

    @property
    def more_policies(self) -> tuple[str, ...]:
        """The policies of the engine beside its own."""
        return (*self.others, *policies_of_draft(self.draft))

    def mesh(self) -> Mesh | None:
        """The mesh of the engine, or of the first of several; None for one engine on one device."""
        return mesh_of(self.tensor, self.context) if self.data == 1 else meshes_of(self.data, self.tensor, self.context)[0]

    def load(self) -> Model:
        """The model, on its devices. Call it before JAX starts: it sets the flags that pages in host memory need."""
        from kvjax.models.loading import load

        if (host_bytes := self.stores.get("host_bytes")) is not None:
            allow_pinned(host_bytes)
            if self.tensor * self.context * self.data == 1:  # else none of the pool lies there
                allow_host_pages()
        given = {"dtype": self.dtype, "weights": self.weights, "lora": self.lora, "max_positions": self.max_positions}
        given["draft_weights"] = self.draft_weights
        return load(self.model, **given, mesh=self.mesh())

    def said(self) -> dict[str, Any]:
        """The options on which answers depend, as they were typed; None for those that were not."""
        typed = {"--model": self.model, "--policy": self.policy, "--prefill": self.prefill, "--dtype": self.dtype}
        typed |= {
            "--weights": self.weights,
            "--lora": " ".join(self.lora) or None,
            "--cache-format": self.cache_format,
            "--max-positions": self.max_positions,
        }
        return typed | {"--reuse-any": self.stores.get("reuse") == "any" or None, **dict.fromkeys(self.left_out)}

    def agree(self, job: Processes) -> None:
        """ValueError, in all processes of a job, unless each was given this. The model may lie in another folder there:
        what it holds is compared when it is loaded."""
        job.agree({name: value for name, value in vars(self).items() if name not in ("model", "lora", "left_out")})

    def plan(self, model: Model) -> MemoryPlan:
        """The memory plan of the engine beside the loaded weights."""
        engine_sizes(self.page_size, self.prefill_chunk, (self.slots,))
        split = {"page_size": self.page_size, "prefill_chunk": self.prefill_chunk, "mesh": self.mesh(), "cache_format": self.cache_format}
        declared = PolicySet(model, self.policy, self.more_policies, self.prefill, **split)
        return planned(declared, self.slots, weights_bytes=0, **plan_sizes(split["mesh"]))

    def sized(self, model: Model, records: Iterable[Record]) -> Setup:
        """This, with the number of pages, where it is not given: as the records need them, if they fit beside the
        weights."""
        return self.fitted(model, lambda: pages_of_job(records, model, self.slots, self.page_size))

    def fitted(self, model: Model, needed: Callable[[], int], *, tokens: int | None = None) -> Setup:
        """This, with the number of pages, where it is not given: those needed, if they fit beside the weights, else as
        many as fit.

        tokens: of the one sequence that needs them. ValueError if the memory of the device and of the host has no room
        for it.
        """
        if self.pages is not None or self.device_bytes is not None:
            return self
        wanted, plan = needed(), self.plan(model)
        if tokens is not None and wanted > plan.pages_that_fit and self.stores.get("host_bytes") is None:
            raise ValueError(
                f"{tokens:,} tokens take {wanted:,} pages, but memory has room for {plan.pages_that_fit:,} beside the weights: shorten the "
                "prompt, choose a smaller --dtype, give --host-memory, or give --pages to try anyway"
            )
        return dataclasses.replace(self, pages=max(1, min(wanted, plan.pages_that_fit)))

    def engines(self, model: Model) -> list[Engine]:
        """New engines for the loaded model."""
        sizes = {"pages": self.pages, "device_bytes": self.device_bytes, "prefill": self.prefill, "policies": self.more_policies}
        sizes |= {"page_size": self.page_size, "prefill_chunk": self.prefill_chunk}
        sizes |= {"batch_buckets": (self.slots,), "cache_format": self.cache_format, **self.stores}
        if self.data == 1:
            return [Engine(model, self.policy, mesh=self.mesh(), **sizes)]
        return replicas(model, self.policy, data=self.data, tensor=self.tensor, context=self.context, **sizes)

    def engine_for(self, model: Model, tokens: int) -> Engine:
        """A new engine for one sequence of up to `tokens` tokens. ValueError if it does not fit."""
        (engine,) = self.fitted(model, lambda: max(1, -(-tokens // self.page_size)), tokens=tokens).engines(model)
        return engine

    def describe(self, engine: Engine) -> str:
        """What the command line says about the engine."""
        policies = f"{engine.policy.describe()}, {engine.prefill_policy.describe()}"
        each = f" in each of {self.data} replicas" if self.data > 1 else ""
        name = "+".join([self.model, *self.lora])
        return f"{name}, {policies}, {engine.allocators['full'].total:,} pages of {self.page_size} tokens{each}"


def mesh_of(tensor: int, context: int) -> Mesh | None:
    """The mesh of these sizes; None for one device. Raises as `kvjax.mesh` does."""
    return None if tensor == context == 1 else mesh(tensor=tensor, context=context)


def planned(declared: PolicySet, sequences: int, **fields: Any) -> MemoryPlan:
    """The memory plan of an engine with these policies. sequences: how many it decodes together. fields: more arguments
    of `kvjax.engine.memory.memory_plan`."""
    sizes = {"page_size": declared.page_size, "prefill_chunk": declared.prefill_chunk, "sequences": sequences}
    known = {"indexes": declared.indexes, "reach": declared.reach, "cache_format": declared.cache_format}
    return memory_plan(declared.model.config, **sizes, **(known | fields))


def pages_of_job(records: Iterable[Record], model: Model, slots: int, page_size: int) -> int:
    """Pages that the `slots` longest records take at once, at least 1. Tokenises them; keeps only lengths."""
    sizes, positions = [], model.config.max_positions
    for record in records:
        if record.error is not None:
            continue
        try:
            if record.size > LONG:  # to count its tokens takes seconds, and it has about as many as fit, or more
                if isinstance(record.prompt, str):
                    check_text(model.tokenizer, record.prompt, positions)
                tokens, sampling = positions, Sampling(**record.sampling)
            else:
                request = request_of(record, model.tokenizer, positions)
                sampling = request.sampling
                tokens = len(request.prompt) + sampling.max_new_tokens - 1
                if sampling.clip and len(request.prompt) <= positions:  # its answer is cut there
                    tokens = min(tokens, positions)
        except ValueError:  # the record's own answer says so
            continue
        if 0 < tokens <= positions:
            sizes.append((tokens, sampling.n))
    return max(1, pages_needed(sizes, slots, page_size))
