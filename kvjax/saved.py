"""Sequences of an engine as files (`Engine.save`, `Engine.restore`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cache.files import read_sequence, write_sequence
from kvjax.cache.groups import stored_pages
from kvjax.cache.transfer import read_pages
from kvjax.policies.decode import KeepsByMass, name_of, parse
from kvjax.release import kept_by
from kvjax.sequences import CachedSequence, Keeping

if TYPE_CHECKING:
    from kvjax.engine import Engine


def save_sequence(engine: Engine, sequence: CachedSequence, path: str | Path) -> None:
    """Write a sequence that may be used. ValueError where `Engine.save` says so."""
    if len(sequence.tokens) != sequence.length:
        raise ValueError(f"{sequence.length} tokens were written, but .tokens holds {len(sequence.tokens)}: append those decoded first")
    engine.check_tokens(sequence.tokens)
    header, keeping = engine._header, sequence.keeping
    if keeping is not None:
        if isinstance(keeping.policy, KeepsByMass):
            raise ValueError(
                f"policy {keeping.policy} chose which pages of the sequence to keep, by what it learned, which files do not hold: suspend "
                "the sequence instead, or save it before the policy decodes it"
            )
        header = header | {"keeps": {"policy": name_of(keeping.policy), "reach": list(keeping.reach)}}
    engine._pool.check()
    groups = engine._groups
    stored = read_pages(engine._pool, engine.spec, groups.ids(sequence, groups.held(sequence)))
    write_sequence(path, header, sequence.tokens, stored, engine.guard.interrupt_point)


def restore_sequence(engine: Engine, path: str | Path) -> CachedSequence:
    """A sequence from a file, among the engine's own. ValueError where `Engine.restore` says so."""
    sizes = {"spec": engine.spec, "vocab_size": engine.config.vocab_size}
    tokens, layers, keeps = read_sequence(path, engine._header, interrupt_point=engine.guard.interrupt_point, **sizes)
    sequence, reach = engine._release.new_sequence(), None
    if keeps is not None:
        name, reach = keeps
        policy = parse(name)
        if kept_by(policy, engine.page_size) != reach:
            raise ValueError(f"{path} holds the pages that policy {name} keeps, which are other ones now; prefill again")
        sequence.keeping = Keeping(policy, reach)
    engine.check_length(len(tokens), None if sequence.keeping is None else sequence.keeping.policy)
    sequence.tokens = tokens
    with engine._kept(sequence):
        held = {group.name: stored_pages(group, len(tokens), reach) for group in engine.spec.groups}
        engine._take_back(sequence, len(tokens), layers, held)
    return sequence
