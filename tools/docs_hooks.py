"""What `make docs` adds to the pages of docs/: the API reference, and the READMEs that the pages link to.

mkdocs calls these functions (see `hooks` in mkdocs.yml). It needs the extra `docs`.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = ("CONTRIBUTING.md", "models/needle/README.md", "serving/clients/python/README.md", "serving/clients/typescript/README.md")
"""Pages outside docs/ that belong to the site, and lie there under repository/."""
PICTURES = ("models/needle/curve.png",)
MODULES = {
    "policies": ("kvjax.policies.decode", "kvjax.policies.prefill"),
    "cache": ("kvjax.cache",),
    "client": ("kvjax.client",),
    "models": ("kvjax.models", "kvjax.model.layers"),
    "cost-model": ("kvjax.cost_model",),
    "evaluation": tuple(
        f"kvjax.evaluation.{name}" for name in ("run", "report", "teacher_forcing", "retrieval", "tasks", "prompt_recall", "statistics")
    ),
    "serving": ("kvjax.serving", "kvjax.serving.batch.setup", "kvjax.serving.batch.ray"),
    "pallas-kernels": (
        "pallas_kernels",
        "pallas_kernels.recurrent.gated_delta",
        *(f"pallas_kernels.core.{name}" for name in ("pages", "page_format", "dispatch")),
    ),
}
"""Pages of the API reference beside that of `kvjax` itself, and the modules that each shows."""
SECTION = re.compile(r"^## (\w+)\n.*?(^```python\n.*?^```\n)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def of_kvjax() -> str:
    """The page of `kvjax`: each public name with its docstring and its example."""
    tree = ast.parse((ROOT / "kvjax" / "__init__.py").read_text(encoding="utf-8"))  # read, not imported: that is mkdocstrings' way, too
    values = {
        node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    examples = dict(SECTION.findall((ROOT / "docs" / "examples.md").read_text(encoding="utf-8")))
    parts = [f"# kvjax\n\nEvery example begins with\n\n{examples['kvjax']}"]
    for name in ast.literal_eval(values["__all__"]):
        if name in examples:
            parts.append(f"::: kvjax.{name}\n    options:\n      show_root_full_path: false\n\n**Example of `{name}`**\n\n{examples[name]}")
    return "\n".join(parts)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the API reference and those of REPOSITORY."""
    pages = {"kvjax": of_kvjax()}
    for name, modules in MODULES.items():
        pages[name] = f"# {modules[0]}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
    for name, text in pages.items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for path in (*REPOSITORY, *PICTURES):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between files of the repository, as links between pages of the site. A link to a file that is no page
    becomes plain text."""
    return link_pages(markdown, page.file.src_uri)


def link_pages(markdown: str, uri: str) -> str:
    """The text of the page `uri` of the site, with its links made for the site."""
    home = uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"

    def linked(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(home), found[1]))
        if target.startswith("docs/"):
            place = target.removeprefix("docs/")
        elif target in REPOSITORY + PICTURES:
            place = f"repository/{target}"
        elif (ROOT / target).exists():
            return "]"
        else:
            return found[0]  # mkdocs says that it is broken
        return f"]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{found[2] or ''})"

    # `[text](file)` of a file that is no page: its brackets go, too.
    made = LINK.sub(linked, markdown)
    return re.sub(r"\[(`[^`\]\n]+`)\](?![(\[:])", r"\1", made)
