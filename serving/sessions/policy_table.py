"""Which decode policies a client or a session's file may name.

A name that comes from outside is only looked up: among the policies that the engine was made with, and the built-in
forms that the operator allows. It never reaches `kvjax.policies.decode.parse`, which runs files.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvjax.checks import listed, whole_number
from kvjax.client.errors import InvalidArgument, ResourceExhausted
from kvjax.engine.policy_set import IndexNotBuilt
from kvjax.policies.decode.naming import WORDS, built_in, name_of
from kvjax.serving.sessions.limits import MAX_NAME, MAX_POLICIES

if TYPE_CHECKING:
    from kvjax.engine.engine import Engine
    from kvjax.policies.decode import DecodePolicy

_FORM = re.compile(r"[a-z-]+(:[\w.+/*=,:-]+)?")
TRIED = ("1", "2", "8", "64", "512", "64+64", "8/all", "8+cache", "8+8bit", "p0.9")
"""What may stand in the place of '*', to see whether any policy of a form can run."""
_IN_FILE = re.compile(r"(?:.*[/\\])?(?P<short>[^/\\]+\.py:.*)", re.DOTALL)


class PolicyTable:
    """The policies that sessions of an engine may name. Any thread may ask.

    Args:
        engine: its declared policies have the names that they were declared by, and those of
            `kvjax.policies.decode.name_of`. A class of a file also has the name without the file's folder, and is shown
            by it.
        allowed: built-in names, as top:32, and forms of them with '*' for any text after the colon, as window:*.
        most: how many distinct policies of forms with '*' may be named. Each compiles its own steps at its first use,
            and others wait.

    fixed: all policies but those of forms with '*': what can be compiled before the first session. ValueError for an
    allowed name or form that is not built in, or that the engine cannot run.
    """

    def __init__(self, engine: Engine, allowed: Iterable[str] = (), most: int = MAX_POLICIES):
        self._engine, self._most = engine, whole_number("max_policies", most, 1)
        self._by_name: dict[str, DecodePolicy] = {}
        self._shown: dict[DecodePolicy, str] = {}
        self._more: dict[DecodePolicy, DecodePolicy] = {}  # of forms with '*', as the engine runs them
        self._typed: dict[DecodePolicy, str] = {}  # of these, by which name each came: a policy's own may be of no form
        self._lock = threading.Lock()
        for policy in engine.policies:
            self._enter(_name_of(policy), policy)
        for name, policy in engine.policy_names.items():
            self._enter(name, policy)
        self._forms = []
        for form in listed(allowed, "allow_policies", "built-in names, as top:32, or forms, as window:*"):
            if "*" in _checked_form(form):
                self._check_runs(form)
                self._forms.append(form)
            else:
                try:
                    self._enter(form, engine.declared(built_in(form)))
                except IndexNotBuilt:
                    said = "needs an index that no policy of the engine builds: name it with --policy"
                    raise ValueError(f"allowed policy {form!r:.80} {said} {form}") from None
        self.fixed = tuple(dict.fromkeys(self._by_name.values()))

    def find(self, name: object) -> DecodePolicy:
        """The policy of a name. InvalidArgument for a name that is not in the table, whether it names a file or not;
        ResourceExhausted for one policy more than `most`."""
        if not isinstance(name, str):
            raise InvalidArgument(f"a policy's name is text, got {type(name).__name__}", field="policy")
        text = name.strip(" ") if len(name) <= MAX_NAME else name[: MAX_NAME + 1]
        if (policy := self._by_name.get(text)) is not None:
            return policy
        plain = text.isascii() and text.isprintable() and len(text) <= MAX_NAME
        if not plain or not any(fnmatch.fnmatchcase(text, form) for form in self._forms):
            raise InvalidArgument(f"policy {text[:80]!r} is none of the server's: name {self}", field="policy")
        try:
            if "*" in text:
                raise ValueError(f"policy {text[:80]!r} is a form of names: put numbers in the place of *")
            policy = built_in(text)
            if policy is None:
                raise ValueError(f"policy {text[:80]!r} is not built in: name {self}")
            return self._brought(policy, text)
        except IndexNotBuilt:
            said = f"policy {text[:80]} needs an index that this server does not build: name {self}"
            raise InvalidArgument(said, field="policy") from None
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidArgument(str(error), field="policy") from None

    def resolve(self, policy: str | DecodePolicy) -> DecodePolicy:
        """The policy of a name, or a policy object that the operator's own code made. InvalidArgument if the engine
        cannot run it."""
        if isinstance(policy, str):
            return self.find(policy)
        try:
            return self._engine.declared(policy)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise InvalidArgument(str(error), field="policy") from None

    def name(self, policy: DecodePolicy) -> str:
        """The name under which the table, of this process or the next, finds a policy."""
        return self._shown.get(policy) or self._typed.get(policy) or name_of(policy)

    def __str__(self) -> str:
        """The names, for errors."""
        names = ", ".join(dict.fromkeys((*self._shown.values(), *self._forms)))[:800]
        return f"{names} (* stands for numbers)" if self._forms else names

    def _check_runs(self, form: str) -> None:
        """ValueError for a form of which no name can run, because the engine builds no index for it."""
        lacking = None
        for numbers in TRIED:
            name = form.replace("*", numbers)
            try:
                if (policy := built_in(name)) is not None:
                    self._engine.declared(policy)
                    return
            except IndexNotBuilt:
                lacking = lacking or name
            except (ValueError, TypeError, NotImplementedError):
                pass  # for other reasons than an index: other numbers may do
        if lacking is not None:
            said = "needs an index that no policy of the engine builds: name one of them with --policy, as --policy"
            raise ValueError(f"allowed policy {form!r:.80} {said} {lacking}")

    def _enter(self, name: str | None, policy: DecodePolicy) -> None:
        if name is None:
            return
        in_file = _IN_FILE.fullmatch(name)
        if in_file and self._by_name.get(in_file["short"], policy) == policy:
            self._by_name[name] = policy
            name = in_file["short"]  # clients need not know the operator's folders
        self._by_name.setdefault(name, policy)
        self._shown.setdefault(policy, name)

    def _brought(self, policy: DecodePolicy, typed: str) -> DecodePolicy:
        """A built-in policy of a form with '*'. However it is written, it counts once. typed: its name, as it was
        given."""
        with self._lock:
            if policy in self._shown:
                return policy
            if policy not in self._more:
                if len(self._more) >= self._most:
                    raise ResourceExhausted(
                        f"sessions have brought in {self._most} policies, the server's limit (--max-policies): name one of them, {self}, "
                        f"{', '.join(map(str, self._more))}"
                    )
                self._more[policy] = declared = self._engine.declared(policy)
                self._typed[declared] = typed
            return self._more[policy]


def _name_of(policy: DecodePolicy) -> str | None:
    """A declared policy's own name; None if its text names another policy."""
    try:
        return name_of(policy)
    except ValueError:
        return None


def _checked_form(form: object) -> str:
    """The form. ValueError unless it is a built-in name, or a form of some."""
    if not isinstance(form, str) or not _FORM.fullmatch(form):
        raise ValueError(f"allowed policy {form!r:.80} is no built-in name, as top:32, and no form of some, as window:*")
    word = form.partition(":")[0]
    if word not in WORDS:
        raise ValueError(f"allowed policy {form!r:.80} is not built in: the built-in words are {', '.join(WORDS)}; others need --policy")
    if "*" not in form:
        if built_in(form) is None:
            raise ValueError(f"allowed policy {form!r:.80} is not understood: docs/policies.md has the forms of {word}")
    elif word == "auto":
        raise ValueError(f"allowed policy {form!r:.80}: name the levels of auto one by one, as auto:fast")
    return form
