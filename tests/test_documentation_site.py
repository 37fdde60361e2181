"""Links between the documents hold, and `make docs` builds them as a site."""

import functools
import importlib
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kvjax

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "models/needle/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "serving" / "clients").glob("*/README.md")),
]
LINK = re.compile(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return found


def broken(path: Path, text: str) -> list[str]:
    """The relative links of a page, and the anchors in them, that lead nowhere."""
    found = []
    for target, anchor in LINK.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        file = (path.parent / target) if target else path
        if not file.exists():
            found.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(text if file == path else file.read_text(encoding="utf-8")):
            found.append(f"{target}#{anchor}")
    return found


def test_every_relative_link_and_anchor_holds():
    assert {str(path): found for path in DOCUMENTS if (found := broken(path, path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("link", ["gone.md", "policies.md#gone", "#gone", "measured/gone.png"])
def test_a_broken_link_is_found(link):
    assert broken(ROOT / "docs" / "using.md", f"# Using\n\n[text]({link})") == [link]


def test_every_page_stands_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"(?:: |- )([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert len(named) == len(set(named))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in named if not name.startswith(("api/", "repository/"))} == pages


class Page(HTMLParser):
    """The ids of a page, and its text."""

    def __init__(self, file: Path):
        super().__init__()
        self.ids, self.text = set(), ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.ids |= {value for name, value in attrs if name == "id"}

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does: a broken link would fail it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.long
def test_the_reference_has_every_public_name(site):
    """Those of each module that it shows, and of `kvjax` itself."""
    from docs_hooks import MODULES

    public = {"kvjax": [f"kvjax.{name}" for name in kvjax.__all__ if name != "__version__"]}
    for page, modules in MODULES.items():
        public[page] = [f"{name}.{each}" for name in modules for each in getattr(importlib.import_module(name), "__all__", ())]
    assert {"kvjax.policies.decode.SelectContext", "kvjax.policies.decode.Blocks"} <= set(public["policies"])
    assert "kvjax.cache.PagedKV" in public["cache"]
    assert "kvjax.client.Client" in public["client"]
    ids = {page: Page(site / "api" / f"{page}.html").ids for page in public}
    missing = {
        page: [name for name in names if name not in ids[page] and name != "pallas_kernels.gated_delta"] for page, names in public.items()
    }
    assert {page: names for page, names in missing.items() if names} == {}


@pytest.mark.long
def test_every_name_of_the_front_door_has_its_docstring_and_its_example(site):
    text = (site / "api" / "kvjax.html").read_text(encoding="utf-8")
    _, *parts = re.split(r'<h2 id="kvjax\.(\w+)"', text)
    parts = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(parts) == set(kvjax.__all__) - {"__version__"}
    assert [name for name, part in parts.items() if f"<strong>Example of <code>{name}</code></strong>" not in part] == []
    assert [name for name, part in parts.items() if "<p>" not in part.partition("<strong>Example of")[0]] == []


@pytest.mark.long
def test_the_search_knows_guides_results_and_the_reference(site):
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert all(f'"location":"{page}.html' in index for page in ("policies", "measured/prefill", "api/policies", "repository/CONTRIBUTING"))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture
def address(site):
    """Where a server has the site: a browser opens no search index of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing."""


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")
@pytest.mark.parametrize(
    ("page", "words"), [("index", "Three paths"), ("measured/decode", "Whole decode steps"), ("api/client", "SessionNotFound")]
)
def test_the_site_opens_in_a_browser(address, page, words):
    """And its own scripts run: they mark the page."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        "--dump-dom",
        f"{address}/{page}.html",
    ]
    opened = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert words in opened
    assert re.search(r"<html[^>]* class=\"[^\"]*js-focus-visible", opened)
    assert 'data-md-component="search-query"' in opened
