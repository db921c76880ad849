"""What mkdocs does differently for this repository: pages of docs/ link to files above it, as GitHub resolves them.

Such a file becomes part of the site under the same path: ``../benchmarks/results/step.json`` is ``benchmarks/results/step.json``
there. CONTRIBUTING.md and CHANGELOG.md are pages. Owns: that, and the colours of code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that lie outside of docs/, and the style sheet of code."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_from_root(text)))
    for page in (ROOT / "docs").glob("*.md"):
        for _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = link.partition("#")[0].removeprefix("../")
            if link.startswith("../") and path not in PAGES and files.get_file_from_path(path) is None:
                if (ROOT / path).is_file():
                    files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    css = HtmlFormatter(style="default").get_style_defs(".highlight")
    files.append(File.generated(config, "_theme/code.css", content=str(css)))
    config.extra_css.append("_theme/code.css")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """``../X`` is X in the site."""
    return LINK.sub(lambda found: found[1] + found[2].removeprefix("../") + found[3], markdown)


def _from_root(text: str) -> str:
    """A page of the repository's root, as one of docs/: its links into docs/ lose that part, README is the first page."""

    def moved(found: re.Match[str]) -> str:
        link = found[2].removeprefix("docs/")
        return found[1] + re.sub(r"^README\.md", "index.md", link) + found[3]

    return LINK.sub(moved, text)
