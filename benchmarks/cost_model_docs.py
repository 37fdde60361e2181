"""The tables of docs/cost-model.md, of the cost models inside the package. `python -m benchmarks.update_docs` writes
them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.cost_model.fitting import Rows, error_table, named
from pallas_kernels.core.tables import markdown


def term_table(file: dict[str, Any]) -> Rows:
    """Columns and rows: the fitted values of a file's cost models."""
    rows = []
    for cost in file["cost_models"]:
        terms = {"bandwidth": f"{cost['bytes_per_s'] / 1e12:.3f} TB/s", "c0": f"{cost['c0'] * 1e3:.3f} ms"}
        for name, price in cost["c1"].items():
            terms[f"c1({name})"] = f"{price['fixed'] * 1e3:.3f} ms + {price['per_byte'] * 1e12:.3f} ms/GB of index"
        if (bus := cost["bus"]) is not None:
            hits = "hits not measured" if bus["hits"] is None else f"hits of recorded lists {bus['hits']:.0%}"
            terms["bus"] = f"{bus['per_s'] / 1e9:.1f} GB/s + {bus['layer_s'] * 1e6:.1f} us a layer; {hits}"
        if (term := cost["exchanges"]) is not None:
            link = "no time told" if term["link_per_s"] is None else f"{term['link_per_s'] / 1e9:.1f} GB/s"
            choose = "" if term["choose_s"] is None else f"; {term['choose_s'] * 1e6:.1f} us a layer that chooses over devices"
            terms["exchanges"] = f"{link} + {term['latency_s'] * 1e6:.1f} us each{choose}"
        rows += [(cost["device"], named(cost), *each) for each in terms.items()]
    return ("device", "model", "term", "fitted"), rows


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
