"""Single shots: a session that is made for one answer, which comes as text."""

from __future__ import annotations

import contextlib

from kvjax.client.errors import SessionError
from kvjax.engine.sampling import Sampling
from kvjax.serving.server.openai_form import Asked
from kvjax.serving.sessions.runtime import SessionRuntime
from kvjax.serving.sessions.throttle import Throttle
from kvjax.text.detokenizer import TextStream


class TextCompletion:
    """A session, made from a prompt and closed after its one answer. It shares no prefix with others, and is not kept
    on disk.

    `more` and `close` wait, so they belong into a thread; `stop` does not. generated: tokens so far. finish_reason:
    "stop" or "length"; None while more text may come. throttle: of all streams of the server.
    """

    def __init__(self, runtime: SessionRuntime, request: Asked, throttle: Throttle):
        model, self._throttle = runtime.engine.model, throttle
        self.prompt_tokens, self.generated = len(request.ids), 0
        self.finish_reason: str | None = None
        self._ends = Sampling(**request.sampling).ends(model.config.eos_token_ids)
        self.session, self._generation = runtime.generate_once(request.ids, **request.sampling)  # which checks the ids
        try:
            self._text = TextStream(model.tokenizer, request.stop, request.ids)
        except BaseException:
            self.close()
            raise

    def more(self) -> str | None:
        """Wait for tokens, and return the text that is certain with them, possibly none yet; None at the end. Raises
        SessionError."""
        if self.finish_reason is not None:
            return None
        tokens = self._generation.ready(self._throttle)
        if not tokens:
            rest = self._text.close()  # which may hold a stop string, before a character that did not become whole
            self.finish_reason = "stop" if self._text.stopped else self._generation.finish_reason
            return rest
        pieces = []
        for token in tokens:
            self.generated += 1
            if token not in self._ends:
                pieces.append(self._text.push(token))
            if self._text.stopped:
                self.finish_reason = "stop"
                self._generation.cancel(keep=0)
                break
        return "".join(pieces)

    def stop(self) -> None:
        """End the generation within a step. Who waits in `more` gets the error Cancelled."""
        self._generation.stop()

    def close(self) -> None:
        """Close the session."""
        with contextlib.suppress(SessionError):  # it may have ended
            self.session.close()
