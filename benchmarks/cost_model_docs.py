"""The tables of docs/cost-model.md, of the cost models inside the package. `python -m benchmarks.update_docs` writes them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from kvjax.cost_model.fitting import error_table, term_table
from pallas_kernels.core.tables import markdown

TABLES = {"terms": term_table, "errors": error_table}


def rendered(text: str, files: Sequence[Path]) -> str:
    """The page with its marked tables made again. ValueError for a table that the page has not."""
    for path in files:
        file, prefix = json.loads(path.read_text(encoding="utf-8")), "packed-" * path.stem.endswith("-packed")
        for table, make in TABLES.items():
            marks = re.compile(rf"(<!-- cost:{prefix}{table} -->\n).*?(<!-- /cost -->)", re.DOTALL)
            if len(marks.findall(text)) != 1:
                raise ValueError(f"docs/cost-model.md needs one table <!-- cost:{prefix}{table} -->")
            written = f"{markdown(*make(file))}\n\n{file['provenance']['date'][:10]}; fitted by `kvjax cost fit` as above.\n"
            text = marks.sub(lambda found, written=written: found[1] + written + found[2], text)
    return text
