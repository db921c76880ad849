"""Relative links of the README, of docs and their neighbours lead to a file, and to a heading, that is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
README_LINES = 150


def prose(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    """Targets of the links and images that are no addresses."""
    return [link for link in LINK.findall(prose(page)) if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain]
    seen: Counter[str] = Counter()
    found = set()
    for slug in slugs:
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken(page: Path, link: str) -> str:
    """Why a link leads nowhere; "" where it leads somewhere."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if path.startswith("/") or not target.is_relative_to(ROOT):
        return "expected a path inside of the repository, relative to the page"
    if not target.exists():
        return "expected a file that is there"
    if anchor and (target.suffix != ".md" or anchor not in anchors(target)):
        return f"expected a heading of {target.name}, got #{anchor}"
    return ""


@pytest.mark.whole
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    reasons = {link: broken(page, link) for link in links(page)}
    assert not {link: reason for link, reason in reasons.items() if reason}


def test_every_page_is_in_the_overview_and_in_the_readme() -> None:
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert names <= {link.partition("#")[0] for link in links(ROOT / "docs" / "index.md")}
    assert names <= {link.partition("#")[0].removeprefix("docs/") for link in links(ROOT / "README.md")}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One: `two`, *3*\n\n## A\n\n## A\n\n```\n# no\n[no](no.md)\n```\n", encoding="utf-8")
    assert links(page) == [] and anchors(page) == {"one-two-3", "a", "a-1"}
    assert not any(broken(page, link) for link in ("page.md", "#a-1", "page.md#one-two-3"))
    assert all(broken(page, link) for link in ("no.md", "#no", "page.md#b", "/page.md", "../page.md"))
