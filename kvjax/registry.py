"""Policies by name: built in, registered in this process, or loaded from a Python file.

`kvjax.policies.decode` and `kvjax.policies.prefill` hold one `Registry` each. A built-in policy may live above them, as
`auto` does, which needs engines to measure with, and `oracle`, which other policies are measured with. The front door
`kvjax/__init__.py` then says where it is (`kvjax.policy_homes`), and its module is imported when the name is first
used. Python runs the front door before any module of the package, so every import of kvjax knows these names.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from kvjax.policy_homes import homes

_OWN_FORMS = "a registered name, FILE.py:CLASS or FILE.py:CLASS:ARGS (as my_file.py:Mine:8/recent=4)"
DECODE_FORMS = (
    "dense, window:SINK+WINDOW (tokens, as window:64+4544), window:KEYS (tokens, 128 of them sinks), window:...+release (gives "
    "other pages back), window:...+remap (counts positions in the cache), window:...+release+remap (does both), "
    "top:K, mean:K (blocks of 128), quest:K (blocks of 16), "
    "cascade:K (of the 256 best bounds, by 4-bit keys; cascade:K/SHORTLIST, cascade:K/all; +1bit, +2bit, +4bit, +8bit, +cache; "
    "+everyN: every Nth layer chooses for those after it; "
    "cascade:pSHARE/SHORTLIST, as cascade:p0.95/64: as many as have this share of attention; cascade:KpSHARE: at most K), "
    "tokens:K (of models with an indexer of tokens), "
    "heavy:K (pages of most attention; others are given back), heavy-tokens:K (tokens of most attention), auto, auto:LEVEL, "
    "NAME+missedSHARE (NAME, watched: as cascade:8+missed0.02), " + _OWN_FORMS
)
PREFILL_FORMS = (
    "dense, bounds:K (blocks of 128; bounds:K+sparse is sparse in shorter prompts too), "
    "momo:K/EXACT (as momo:128/8: K blocks of 64, EXACT of them exactly), "
    "window:SINK+WINDOW (tokens, as window:64+1024; window:64+1024+remap counts positions in the cache), "
    "oracle:K (for measuring), "
    "tokens:K (of models with an indexer of tokens), "
    "auto, auto:LEVEL (per chunk, the fastest policy on record for the level), " + _OWN_FORMS
)
"""Names of policies, for messages and for the help of commands, which must not import JAX."""

_IN_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<args>.*))?", re.DOTALL)
_FORM = re.compile(r"[^,(]+(?:\([^()]*\))?")
_NAME = re.compile(r"[A-Za-z][\w-]*")
_files: dict[tuple[Path, str], ModuleType] = {}
"""Files loaded so far, by path and SHA-256. An unchanged file gives the same class again, so its policies are equal."""

LARGEST = 2**31 - 1
"""The largest number in a name: counts of blocks and tokens are 32-bit integers on the device."""


def forms_of(forms: str) -> list[str]:
    """Known names, each with what explains it."""
    return [form.strip() for form in _FORM.findall(forms)]


def plain(forms: str) -> str:
    """Known names without what explains them."""
    return re.sub(r" \([^()]*\)", "", forms)


class Registry:
    """Names of one kind of policy.

    Args:
        kind: for messages, "policy" or "prefill policy".
        forms: for messages, the known names.
        remedy: for messages, how to get parts that are missing.
        parts: attributes that every policy of this kind has; the first one tells a policy from other objects.
        reserved: first words of built-in names.
        read: returns the policy of a built-in name, None for other names; ValueError for numbers that it cannot have.
        hint: for messages, what an unknown name may mean; "" if nothing is known.
    """

    def __init__(
        self,
        kind: str,
        *,
        forms: str,
        remedy: str,
        parts: tuple[str, ...],
        reserved: tuple[str, ...],
        read: Callable[[str], Any | None],
        hint: Callable[[str], str] = lambda name: "",
    ):
        self.kind, self.forms, self.remedy, self.parts, self.reserved = kind, forms, remedy, parts, reserved
        self._read, self._hint = read, hint
        self._factories: dict[str, Callable[..., Any]] = {}
        self._named: dict[str, Any] = {}
        self._made: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._sources: dict[Any, str] = {}

    def parse(self, name: Any) -> Any:
        """The policy of a name; a policy is returned as it is. The ValueError lists the known forms, or says in one
        sentence what is wrong with the user's own policy."""
        if not isinstance(name, str):
            if not hasattr(name, self.parts[0]):
                raise ValueError(f"{name!r} is neither a {self.kind} nor a {self.kind}'s name; names are {plain(self.forms)}")
            self.check(name)
            return name
        policy = self.built_in(text := name.strip()) or self.find(text)
        if policy is None:
            raise ValueError(f"{self.kind} {name!r} is not understood{self._hint(text) or self._known(text)}")
        return policy

    def parse_recorded(self, name: Any) -> Any:
        """The policy of a name that stands in data: in a file that a program wrote, or in what a client sends.

        A built-in policy, or one that the code or the command line of this process has named before. No file is loaded,
        looked for or run, and no registered factory is called. ValueError for any other name.
        """
        if not isinstance(name, str):
            raise ValueError(f"the name of a {self.kind} is text, got {name!r:.60}")
        policy = self.built_in(name) or self._made.get(name) or self._named.get(name)
        if policy is None:
            raise ValueError(
                f"{self.kind} {name!r:.80} is not understood here: data names policies that are built in, or that the command line or the "
                "code of this process has named before"
            )
        return policy

    def _known(self, name: str) -> str:
        """What to write in place of an unknown name: the forms that begin with its word if there are some, else all, in
        short."""
        word = name.partition(":")[0]
        own = [form for form in forms_of(self.forms) if re.split(r"[: ]", form)[0] == word]
        return f"; write it as {' or '.join(own)}" if own else f"; there are {plain(self.forms)}; docs/policies.md explains them"

    def built_in(self, name: str) -> Any | None:
        """The policy of a built-in name, None for other names. ValueError for numbers that it cannot have."""
        word, colon, args = name.partition(":")
        # Python's int() refuses thousands of digits with a message of its own.
        form = re.fullmatch(r"[a-z-]+:(.*)", name)
        if form and any(len(number) > 10 or int(number) > LARGEST for number in re.findall(r"(?<![\d.])\d+", form[1])):
            raise ValueError(f"{self.kind} {name!r} has a number above {LARGEST}, the largest possible: name a smaller one")
        try:
            if home := homes.get((self.kind, word)):
                module, made = home
                return getattr(importlib.import_module(module), made)(*([args] if colon else []))
            return self._read(name)
        except ValueError as error:
            if name in str(error):
                raise
            raise ValueError(f"{self.kind} {name!r}: {error}") from None

    def is_built_in(self, name: str) -> bool:
        """Whether a built-in policy has this name."""
        try:
            return self.built_in(name) is not None
        except ValueError:
            return False

    def register(self, name: str, factory: Callable[..., Any], *, replace: bool = False) -> None:
        """Let `name` and `name:ARGS` stand for `factory()` and `factory("ARGS")`, in this process.

        replace: replace an earlier factory of that name. ValueError for a name that is built in, registered or
        malformed.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a {self.kind}: use a letter, then letters, digits, '_' and '-'")
        if name in self.reserved:
            raise ValueError(f"{name!r} is a built-in {self.kind}; choose another name")
        if name in self._factories and not replace:
            raise ValueError(f"{name!r} is already registered; choose another name, or pass replace=True")
        if not callable(factory):
            raise ValueError(f"the factory of {self.kind} {name!r} must be callable, a class for instance; got {factory!r:.60}")
        self._factories[name] = factory

    def find(self, name: str) -> Any | None:
        """The policy of a registered name or a file's class; None for other names.

        ValueError if the file is missing or fails, has no such class, or makes no policy: one sentence with file, line
        and error.
        """
        if match := _IN_FILE.fullmatch(name):
            policy = self._from_file(name, Path(match["path"]), match["name"], match["args"])
        elif name in self._named:
            return self._named[name]
        else:
            word, colon, args = name.partition(":")
            if word not in self._factories:
                return None
            factory = self._factories[word]
            try:
                policy = factory(args) if colon else factory()
            except Exception as error:
                raise ValueError(f"{self.kind} {name!r} could not be made: {place_and_error(error, _file_of(factory))}") from error
        self.check(policy, name)
        self._names.setdefault(policy, name)
        self._made[name] = policy
        return policy

    def check(self, policy: Any, name: str | None = None) -> None:
        """ValueError unless a policy has its parts, and can be hashed and compared by value."""
        named = f"{self.kind} {name!r}" if name else f"{policy!r:.60}"
        if inspect.isclass(policy):
            raise ValueError(f"{named} is a class; make a {self.kind} of it: {policy.__name__}(...)")
        if missing := [part for part in self.parts if not hasattr(policy, part)]:
            raise ValueError(f"{named} is no {self.kind}: a {type(policy).__name__} has no {', '.join(missing)}; {self.remedy}")
        frozen = f"make {type(policy).__name__} a frozen dataclass (@dataclasses.dataclass(frozen=True)) of numbers and strings"
        try:
            hash(policy)
        except TypeError as error:
            raise ValueError(f"{named} must be hashable ({error}): {frozen}") from None
        if type(policy).__eq__ is object.__eq__:
            raise ValueError(f"{named} must be equal to another of the same settings: {frozen}")

    def name_of(self, policy: Any) -> str:
        """The name under which reports list a policy, and from which `parse` gives it back: the name it was parsed
        from, else its `str`.

        Of two policies with one `str`, the later one gets the name. ValueError if the `str` names another policy.
        """
        self.check(policy)
        name = str(policy)
        if type(self.built_in(name)) is type(policy):
            return name
        if policy in self._names:
            return self._names[policy]
        if _IN_FILE.fullmatch(name) or name.partition(":")[0] in (*self.reserved, *self._factories):
            raise ValueError(f"{self.kind} {policy!r} calls itself {name!r}, which names another policy: give it a __str__ of its own")
        self._named[name] = policy
        return name

    def identity(self, policy: Any) -> str:
        """Everything that decides what a policy does, for journals of jobs: its fields and, if it comes from a file,
        the file's SHA-256."""
        name, source = self._names.get(policy), self._sources.get(type(policy))
        parts = (Path(name).name if source and name else name, repr(policy), source)
        return ", ".join(part for part in parts if part)

    def _from_file(self, name: str, path: Path, class_name: str, args: str | None) -> Any:
        module, digest = _load(path, f"{self.kind} {name!r}")
        made = getattr(module, class_name, None)
        if not inspect.isclass(made):
            classes = [each.__name__ for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
            raise ValueError(f"{self.kind} {name!r}: {path} has no class {class_name}; its classes are {', '.join(classes) or 'none'}")
        positional, named = _arguments(args, f"{self.kind} {name!r}")
        try:
            policy = made(*positional, **named)
        except Exception as error:
            raise ValueError(f"{self.kind} {name!r} could not be made: {place_and_error(error, path)}") from error
        self._sources[made] = f"file with SHA-256 {digest}"
        return policy


def place_and_error(error: BaseException, path: Path | None = None) -> str:
    """An error on one line, with the last line of `path` (None: of any policy file) that it passed through."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError) and error.filename and path is not None and Path(error.filename) == path.resolve():
        return f"{path}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    files = {path.resolve()} if path is not None else {file for file, _ in _files}
    lines = [(file, line) for file, line in _frames(error) if Path(file) in files]
    if not lines:
        return text
    file, line = lines[-1]
    return f"{path or _as_seen_from_here(Path(file))}, line {line}: {text}"


def _as_seen_from_here(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def passed_through_a_policy_file(error: BaseException) -> bool:
    """Whether an error passed through a policy's own file."""
    files = {str(file) for file, _ in _files}
    return any(file in files for file, _ in _frames(error))


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    """File and line of every frame that an error passed through."""
    yield from ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))


def _load(path: Path, named: str) -> tuple[ModuleType, str]:
    """The module of a file, and the file's SHA-256. A changed file is loaded again. A file cannot import the files
    beside it."""
    if not path.is_file():
        raise ValueError(f"{named}: there is no file {path}")
    file = path.resolve()
    source = file.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    if (file, digest) not in _files:
        module = ModuleType(f"kvjax_policy_file_{digest[:16]}_{len(_files)}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module  # dataclasses look up their module
        try:
            exec(compile(source, str(file), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            raise ValueError(f"{named}: {place_and_error(error, path)}") from error
        _files[file, digest] = module
    return _files[file, digest], digest


def _arguments(text: str | None, named: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, Python literals with '/' between them: "8/recent=4" is (8, recent=4)."""
    positional, keywords = [], {}
    for part in text.split("/") if text else ():
        key, equals, value = part.partition("=")
        try:
            literal = ast.literal_eval(value.strip() if equals else part.strip())
        except (ValueError, SyntaxError):
            raise ValueError(f"{named}: {part!r} is no number or quoted string; ARGS are as in CLASS:8/recent=4") from None
        if not equals:
            positional.append(literal)
        elif key.strip() in keywords:
            raise ValueError(f"{named}: {key.strip()} is given twice")
        else:
            keywords[key.strip()] = literal
    return positional, keywords


def _file_of(factory: Callable[..., Any]) -> Path | None:
    """The file of a factory, if it has one."""
    try:
        file = inspect.getsourcefile(factory)
    except TypeError:
        return None
    return Path(file) if file else None
