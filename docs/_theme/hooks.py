"""What mkdocs does for this repository: the pages of docs/ link to files above it, as GitHub resolves them.

Such a file becomes part of the site under its path in the repository; CONTRIBUTING.md and CHANGELOG.md become pages,
and links to README.md go to the first page. A page shows a table of the README where GitHub shows only the link to it.
Owns: that, the colours of code, which blocks are messages, and the search's index for pages from the disk.
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
TABLE = re.compile(r"<!-- on the site: the table of README, (.+) -->")
CODE = "_theme/code.css"
STYLES = {"light": "default", "dark": "github-dark"}
MESSAGES = "troubleshooting.md"
MESSAGE = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that lie outside of docs/, and the style sheet of code."""
    for name in PAGES:
        files.append(File.generated(config, name, content=_from_root((ROOT / name).read_text(encoding="utf-8"))))
    for page in (ROOT / "docs").glob("*.md"):
        for _, link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            path = link.partition("#")[0].removeprefix("../")
            linked = link.startswith("../") and path not in ("README.md", *PAGES)
            if linked and (ROOT / path).is_file() and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, CODE, content=_colours()))
    config.extra_css.append(CODE)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to ``../X`` are to X in the site; the README's tables are put in; a message is one line, which flows."""
    with_tables = TABLE.sub(lambda found: _table(found[1]), markdown)
    if page.file.src_uri == MESSAGES:
        with_tables = MESSAGE.sub(_message, with_tables)
    return LINK.sub(lambda found: found[1] + _in_site(found[2].removeprefix("../")) + found[3], with_tables)


def on_post_build(config: Any, **_: Any) -> None:
    """The search's index once more, as a script: a browser reads no JSON from the disk."""
    index = Path(config.site_dir, "search", "search_index.json")
    script = f"const searchIndex = {index.read_text(encoding='utf-8')};\n"
    index.with_suffix(".js").write_text(script, encoding="utf-8")


def _colours() -> str:
    """The style sheet of code: each style where the system asks for it, and where the reader does."""
    other = {"light": "dark", "dark": "light"}
    parts = []
    for theme, style in STYLES.items():
        formatter = HtmlFormatter(style=style)
        asked = formatter.get_style_defs(f':root:not([data-theme="{other[theme]}"]) .highlight')
        chosen = formatter.get_style_defs(f':root[data-theme="{theme}"] .highlight')
        parts += [f"@media (prefers-color-scheme: {theme}) {{\n{asked}\n}}", str(chosen)]
    return "\n".join(parts)


def _from_root(text: str) -> str:
    """A page of the repository's root as one of docs/."""
    return LINK.sub(lambda found: found[1] + _in_site(found[2].removeprefix("docs/")) + found[3], text)


def _in_site(link: str) -> str:
    return re.sub(r"^README\.md(#.*)?$", "index.md", link)


def _message(found: re.Match[str]) -> str:
    """A fence of a sentence, which is broken into lines for the source alone."""
    return f"```{{.text .message}}\n{' '.join(found[1].split())}\n```"


def _table(heading: str) -> str:
    """The lines of the table below that heading of the README."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    if not lines:
        raise ValueError(f"README.md: expected a table below the heading {heading!r}, there is none")
    return "\n".join(lines)
