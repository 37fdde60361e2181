"""kvjax: long-context language-model inference in JAX.

The KV cache is a pool of pages and attention reads a list of blocks of them; a policy is a function that returns the
list.

    import kvjax
    model = kvjax.load("needle")
    kvjax.generate(model, "The pass key for ...", policy="cascade:8", max_new_tokens=8)

Names are resolved on first use, so importing kvjax starts no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.policy_homes import lives_in
from pallas_kernels.core.renamed import answer

if TYPE_CHECKING:  # what editors and type checkers see
    from kvjax import cost_model as cost_model
    from kvjax import evaluation as evaluation
    from kvjax import models as models
    from kvjax import policies as policies
    from kvjax import serving as serving
    from kvjax.axes import mesh
    from kvjax.cache import OutOfPages
    from kvjax.engine.engine import Engine
    from kvjax.engine.memory import memory_plan
    from kvjax.engine.sampling import NotFinite, Sampling
    from kvjax.engine.sequence import CachedSequence
    from kvjax.evaluation.oracle_blocks import OracleBlocks
    from kvjax.generation import generate, run
    from kvjax.model.config import ModelConfig
    from kvjax.models import CausalLM, load, save
    from kvjax.policies.decode import Cascade, Dense, HeavyPages, HeavyTokens, TopBlocks, Window
    from kvjax.policies.prefill import DensePrefill, MeasureOnceMaskOnce, SinkWindow
    from kvjax.scheduler.data_parallel import replicas
    from kvjax.scheduler.lockstep import ProcessLost
    from kvjax.scheduler.processes import start_processes
    from kvjax.scheduler.request import Completion, Request
    from kvjax.scheduler.scheduler import Scheduler
    from kvjax.scheduler.scoring import Score, score
    from kvjax.serving import run_batch
    from kvjax.serving.sessions.runtime import Session, SessionRuntime
    from pallas_kernels.core.dispatch import forced as dispatch

__version__ = "0.2.0"

__all__ = [
    "CachedSequence",
    "Cascade",
    "CausalLM",
    "Completion",
    "Dense",
    "DensePrefill",
    "Engine",
    "HeavyPages",
    "HeavyTokens",
    "MeasureOnceMaskOnce",
    "ModelConfig",
    "NotFinite",
    "OracleBlocks",
    "OutOfPages",
    "ProcessLost",
    "Request",
    "Sampling",
    "Scheduler",
    "Score",
    "Session",
    "SessionRuntime",
    "SinkWindow",
    "TopBlocks",
    "Window",
    "__version__",
    "dispatch",
    "generate",
    "load",
    "memory_plan",
    "mesh",
    "replicas",
    "run",
    "run_batch",
    "save",
    "score",
    "start_processes",
]

_HOMES = {
    "CachedSequence": "kvjax.engine.sequence",
    "Cascade": "kvjax.policies.decode",
    "CausalLM": "kvjax.models",
    "Completion": "kvjax.scheduler.request",
    "Dense": "kvjax.policies.decode",
    "DensePrefill": "kvjax.policies.prefill",
    "Engine": "kvjax.engine.engine",
    "HeavyPages": "kvjax.policies.decode",
    "HeavyTokens": "kvjax.policies.decode",
    "MeasureOnceMaskOnce": "kvjax.policies.prefill",
    "ModelConfig": "kvjax.model.config",
    "NotFinite": "kvjax.engine.sampling",
    "OracleBlocks": "kvjax.evaluation.oracle_blocks",
    "OutOfPages": "kvjax.cache",
    "ProcessLost": "kvjax.scheduler.lockstep",
    "Request": "kvjax.scheduler.request",
    "Sampling": "kvjax.engine.sampling",
    "Scheduler": "kvjax.scheduler.scheduler",
    "Score": "kvjax.scheduler.scoring",
    "Session": "kvjax.serving.sessions.runtime",
    "SessionRuntime": "kvjax.serving.sessions.runtime",
    "SinkWindow": "kvjax.policies.prefill",
    "TopBlocks": "kvjax.policies.decode",
    "Window": "kvjax.policies.decode",
    "dispatch": "pallas_kernels.core.dispatch:forced",
    "generate": "kvjax.generation",
    "load": "kvjax.models",
    "memory_plan": "kvjax.engine.memory",
    "mesh": "kvjax.axes",
    "replicas": "kvjax.scheduler.data_parallel",
    "run": "kvjax.generation",
    "run_batch": "kvjax.serving",
    "save": "kvjax.models",
    "score": "kvjax.scheduler.scoring",
    "start_processes": "kvjax.scheduler.processes",
}
_PACKAGES = ("cost_model", "evaluation", "models", "policies", "serving")

_FORMER = ("bill", "fidelity")
"""Modules that only say which one took their place."""

# `auto` measures with an engine, so it is defined above the engine. Policies and engines find it by name only.
lives_in("policy", "auto", "kvjax.cost_model.auto", "Auto")
lives_in("prefill policy", "auto", "kvjax.cost_model.auto", "AutoPrefill")
# The oracle is for measuring, so it lives with the measures.
lives_in("prefill policy", "oracle", "kvjax.evaluation.oracle_blocks", "oracle")

answer(
    {
        "kvjax.bill": "kvjax.cost_model: a Bill is a CostModel, known_bill is known_cost_model (docs/cost-model.md)",
        "kvjax.fidelity": "kvjax.evaluation: panel is run, forcing is teacher_forcing, echo is prompt_recall (docs/evaluation.md)",
        "kvjax.engine.decode_runner": "part of kvjax.engine.engine: DRAFTS is in kvjax.engine.step_plan",
    }
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)
    if name in _PACKAGES:
        return importlib.import_module(f"kvjax.{name}")
    if name in _FORMER:
        try:
            importlib.import_module(f"kvjax.{name}")
        except ImportError as error:
            raise AttributeError(error.msg) from None
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
