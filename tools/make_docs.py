"""Writes the API reference of kvjax to a folder, as HTML: each public name with its docstring, and its example from docs/examples.md.

`make docs` runs this. It needs the extra `docs`.
"""

import inspect
import re
import sys
import warnings
from pathlib import Path

import pdoc

import kvjax

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples.md"
SECTION = re.compile(r"^## (\w+)\n.*?(^```python\n.*?^```\n)", re.MULTILINE | re.DOTALL)


def main(folder: Path) -> None:
    examples = dict(SECTION.findall(EXAMPLES.read_text(encoding="utf-8")))
    kvjax.__doc__ = f"{inspect.getdoc(kvjax)}\n\nEvery example below begins with\n\n{examples['kvjax']}"
    for name in kvjax.__all__:
        found = getattr(kvjax, name)
        if name in examples:
            inspect.unwrap(found).__doc__ = f"{inspect.getdoc(found)}\n\n**Example**\n\n{examples[name]}"
        setattr(kvjax, name, found)  # pdoc documents only names that are set, and ours are set on first use
    pdoc.render.configure(docformat="google", footer_text=f"kvjax {kvjax.__version__}")
    warnings.filterwarnings("ignore", message="'kvjax' may refer to either")  # the folder here; pdoc takes the installed package
    pdoc.pdoc("kvjax", r"!kvjax\..*", output_directory=folder)
    print(f"kvjax: the API reference is in {folder / 'kvjax.html'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: make_docs.py FOLDER")
    main(Path(sys.argv[1]))
