"""Writes the tables of docs/cost-model.md from the cost models inside the package: python benchmarks/cost_model_docs.py."""

import json
import re
from pathlib import Path

from kvjax.cost_model.fitting import error_table, term_table
from pallas_kernels.core.tables import markdown

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cost-model.md"
FITTED = ROOT / "kvjax" / "cost_model" / "fitted"
FILES = {"": "nvidia-h200.json", "packed-": "nvidia-h200-packed.json"}
TABLES = {"terms": term_table, "errors": error_table}


def rendered(text: str) -> str:
    """The page with its marked tables and its commands written anew. ValueError for a table that the page has not."""
    for prefix, name in FILES.items():
        file = json.loads((FITTED / name).read_text(encoding="utf-8"))
        for table, make in TABLES.items():
            marks = re.compile(rf"(<!-- cost:{prefix}{table} -->\n).*?(<!-- /cost -->)", re.DOTALL)
            if len(marks.findall(text)) != 1:
                raise ValueError(f"{PAGE} needs one table <!-- cost:{prefix}{table} -->")
            written = f"{markdown(*make(file))}\n\n{file['provenance']['date'][:10]}; fitted by `kvjax cost fit` as above.\n"
            text = marks.sub(lambda found, written=written: found[1] + written + found[2], text)
    return text


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
