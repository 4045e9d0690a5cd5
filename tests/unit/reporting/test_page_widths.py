"""The page in a browser, 400 and 1,400 px wide: no cell of a table is out of reach, and figures are drawn."""

import functools
import html
import json
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_blame_page import blamed

from snip_megatron.reporting.blame import write_blame_page
from snip_megatron.reporting.report import write_report
from snip_megatron.sensitivity.blame import ROUNDING

ROOT = Path(__file__).parents[3]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the page is not looked at in a browser")

# A frame of each width beside this script, which the page's own policy would not run.
FRAMES = """<!DOCTYPE html><body><pre id="result"></pre>
<iframe width="400" height="3000" src="page.html"></iframe><iframe width="1400" height="3000" src="page.html"></iframe>
<script>
onload = () => {
  const result = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, width = frame.clientWidth;
    page.querySelectorAll("details").forEach((each) => { each.open = true; });
    const tables = [...page.querySelectorAll("table")].map((table) => {
      const box = table.closest(".scroll"), edges = box.getBoundingClientRect();
      box.scrollLeft = 1e6;
      const last = [...table.querySelectorAll("tr > :last-child")];
      const end = Math.max(...last.map((cell) => cell.getBoundingClientRect().right));
      return { name: box.getAttribute("aria-label"), cells: table.querySelectorAll("td, th").length,
               scrolls: box.scrollWidth > box.clientWidth, inside: edges.left >= 0 && edges.right <= width,
               reached: end <= edges.right + 1 };
    });
    const figures = [...page.querySelectorAll(".figure")].map((each) => each.querySelectorAll("svg.main-svg").length);
    return { width, page: page.documentElement.scrollWidth, tables, figures };
  });
  document.getElementById("result").textContent = JSON.stringify(result);
};
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a browser finds in the page of a real run."""
    folder = tmp_path_factory.mktemp("page")
    write_report(ROOT / "examples" / "recorded_run", folder / "page.html")
    return seen(folder)


def seen(folder: Path) -> list[dict[str, Any]]:
    """Return what a browser finds in ``page.html`` of a folder, in a frame of each width."""
    (folder / "index.html").write_text(FRAMES)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/index.html"
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
        command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        server.shutdown()
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("index", [0, 1], ids=["400px", "1400px"])
def test_no_cell_is_out_of_reach(frames: list[dict[str, Any]], index: int) -> None:
    frame = frames[index]
    assert frame["width"] == [400, 1400][index]
    assert frame["page"] <= frame["width"]
    names = {table["name"] for table in frame["tables"]}
    assert {"Updates", "Phases", "Steps by map", "Facts", "The GEMMs of this map, the most harmful first"} <= names
    for table in frame["tables"]:
        assert table["cells"], table
        assert table["inside"], table
        assert table["reached"], table
    assert all(frame["figures"]), "a figure is not drawn"
    scrolling = {table["name"] for table in frame["tables"] if table["scrolls"]}
    assert ("Updates" in scrolling) == (frame["width"] == 400)


def test_the_page_of_a_verdict_fits_both_widths(tmp_path: Path) -> None:
    write_blame_page(blamed(ROUNDING), tmp_path / "page.html")
    for frame in seen(tmp_path):
        assert frame["page"] <= frame["width"]
        assert {table["name"] for table in frame["tables"]} == {"Loss by pass", "Culprits", "Bisection"}
        assert all(table["inside"] and table["reached"] for table in frame["tables"])
