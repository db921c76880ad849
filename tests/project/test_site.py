"""The site of docs/ in a browser, on a desktop and a phone, light and dark: nothing is too wide, collapsed or faint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"desktop": 1280, "phone": 390}
LINE_PX = 12
"""A line of code is higher than that."""
CONTRAST = 4.5
"""WCAG 2 AA, for text of this size."""
DARK = "--blink-settings=preferredColorScheme=0"
pytestmark = [
    pytest.mark.full,  # builds the site and starts browsers
    pytest.mark.skipif(
        find_spec("mkdocs") is None or find_spec("mkdocstrings_handlers") is None,
        reason="mkdocs and mkdocstrings-python are not installed; they come with the extra 'docs'",
    ),
]
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser (chromium or google-chrome) on the path")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def browser(folder: Path, *options: str) -> list[str]:
    """The command of a browser without a window, with a profile of its own."""
    assert CHROMIUM is not None
    own = f"--user-data-dir={folder / 'profile'}"
    return [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", own, *options]


@contextmanager
def served(site: Path) -> Iterator[tuple[str, Queue[Any]]]:
    """The site and measure.html from a server, and what is posted to it."""
    found: Queue[Any] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(site))

        def translate_path(self, path: str) -> str:
            measuring = path.partition("?")[0] == "/measure.html"
            return str(Path(__file__).with_name("measure.html")) if measuring else super().translate_path(path)

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/measure.html", found
        finally:
            server.shutdown()
            thread.join()


def asked(site: Path, folder: Path, task: str, pages: Sequence[str], *options: str) -> Any:
    """What measure.html finds. task: a function of it."""
    question = quote(json.dumps({"task": task, "pages": pages, "widths": list(WIDTHS.values())}))
    with served(site) as (address, found):
        command = browser(folder, *options, f"{address}#{question}")
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            Thread(target=lambda: found.put({"error": f"the browser ended with {process.wait()}"})).start()
            try:
                answer = found.get(timeout=HANG_S)
            finally:
                process.terminate()
    assert "error" not in answer, answer
    return answer


def complaints(layouts: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong with pages."""
    found = []
    for layout in layouts:
        where = f"{layout['page']}, {layout['width']} px, {layout['theme']}"
        found += [f"{where}: the page is wider than its window: {wide}" for wide in layout["wide"]]
        found += [
            f"{where}: a block of {block['lines']} lines is {block['height']:.0f} px high: {block['text']!r}"
            for block in layout["blocks"]
            if block["height"] < block["lines"] * LINE_PX or block["begun"][0] != block["begun"][1]
        ]
        found += [
            f"{where}: the text of {kind} has a contrast of {value:.2f}, expected {CONTRAST}"
            for kind, value in layout["contrast"].items()
            if value < CONTRAST
        ]
    return found


@in_browser
def test_pages_fit_keep_their_lines_and_can_be_read(site: Path, tmp_path: Path) -> None:
    pages = sorted(page.name for page in site.glob("*.html") if page.name != "404.html")
    layouts = asked(site, tmp_path, "layouts", pages)
    assert len(layouts) == len(pages) * len(WIDTHS) * 2 and len(pages) > 20
    assert sum(len(layout["blocks"]) for layout in layouts) > 100 * len(WIDTHS) * 2
    assert {layout["first"] for layout in layouts} == {"light"}
    found = complaints(layouts)
    assert not found, "\n".join(["", *found])


@in_browser
def test_a_page_that_is_wide_collapsed_or_faint_is_found(site: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(site, bad)
    with (bad / "_theme" / "site.css").open("a", encoding="utf-8") as file:
        file.write(".rst-content pre code { white-space: normal !important; }\n")
        file.write(".rst-content h1 { width: 1500px; }\n.rst-content p { color: #808080 !important; }\n")
    layouts = asked(bad, tmp_path, "layouts", ["planning.html"])
    for layout in layouts:
        text = "\n".join(complaints([layout]))
        assert all(word in text for word in ("wider than its window", "a block of ", "p. has a contrast")), text


@in_browser
def test_the_system_says_dark_and_the_reader_may_change_it(site: Path, tmp_path: Path) -> None:
    changed = ["dark", "light", "light", "dark", "dark", "light"]
    assert asked(site, tmp_path / "dark", "toggled", ["index.html"], DARK) == changed
    changed = ["light", "dark", "dark", "light", "light", "dark"]
    assert asked(site, tmp_path / "light", "toggled", ["index.html"]) == changed


@in_browser
def test_search_finds_pages_from_a_server_and_from_the_disk(site: Path, tmp_path: Path) -> None:
    assert "./offload.html" in asked(site, tmp_path, "searched", ["search.html?q=offloading"])
    address = (site / "search.html").as_uri() + "?q=offloading"
    command = browser(tmp_path, "--virtual-time-budget=60000", "--dump-dom", address)
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert '<h3><a href="./offload.html">' in done.stdout


def test_a_message_is_one_line_and_an_output_keeps_its_lines(site: Path) -> None:
    assert 'class="language-text message highlight"' in (site / "troubleshooting.html").read_text(encoding="utf-8")
    assert "message highlight" not in (site / "planning.html").read_text(encoding="utf-8")
