"""A chunk of prefill in one program, from token ids to logits."""

from kvjax.axes import WHOLE_COPY
from kvjax.cache import Cache
from kvjax.engine.sequence_parallel import own_rows, whole_rows
from kvjax.engine.steps import ChunkInputs, StepProgram, chunk_logits, prefill_layers


def whole_chunk(static, inputs, *, all_logits=False):
    """Logits, the cache, and what is missing. Token ids are the `x` of the inputs. DONATES cache."""
    x = static.decoder.embed(inputs.params, own_rows(inputs.cache.shards, inputs.x))
    x, cache, _, missing, _ = prefill_layers(static, inputs._replace(x=x))
    logits = chunk_logits(static.decoder, inputs.params, whole_rows(cache.shards, x), inputs.starts, cache.lengths, all_logits=all_logits)
    return logits, cache, missing


def _program(step, name):
    return StepProgram(step, ChunkInputs, ("cache",), lambda *_: (WHOLE_COPY, Cache, WHOLE_COPY), lambda *_: {}, name)


prefill_step = _program(whole_chunk, "prefill_step")
prefill_all = _program(lambda static, inputs: whole_chunk(static, inputs, all_logits=True), "prefill_all")
