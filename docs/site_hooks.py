"""Hooks of ``mkdocs.yml``: pages from the whole repository, and references generated from the code.

The site has the paths of the repository, so that a link works in the repository and in the site:

- ``README.md`` is the first page. Every Markdown file of ``docs/``, the package, ``launch/``, ``patches/`` and
  ``benchmarks/`` is a page.
- A file that a page links to, or names as code, is part of the site: source code as a page with line numbers, anything
  else as it is. Names become links.
- The drawing of the rooms becomes a picture.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import rooms_picture  # noqa: E402  # beside this file, which mkdocs loads by its path

FOLDERS = ("docs", "snip_megatron", "launch", "patches", "benchmarks")
DATA = {".json", ".png", ".svg", ".csv"}
"""Kinds of linked files that a browser shows by itself."""


def pages() -> list[str]:
    """Paths of all pages, relative to the repository."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def named(nav: Any) -> Iterator[str]:
    """The paths in a ``nav`` of ``mkdocs.yml``."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named(part)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that ``nav`` leaves out to the section of their folder."""
    nav: list[Any] = config.nav or []
    left = [page for page in pages() if page not in set(named(nav))]
    rooms = [page for page in left if page.startswith("snip_megatron/")]
    results = [page for page in left if page.startswith("benchmarks/")]
    more = [page for page in left if page not in rooms and page not in results]
    for title, found in (("Rooms", rooms), ("Results", results), ("More", more)):
        section = next((part[title] for part in nav if isinstance(part, dict) and title in part), None)
        if section is not None:
            section += found
        elif found:
            nav.insert(len(nav) - 1, {title: found})
    config.nav = nav
    return config


# -- which files the site has ----------------------------------------------------------------------------------------
def destination(path: str) -> str:
    """Where a page is in the site: docs/ is its root, rooms stand under rooms/."""
    target = re.sub(r"^docs/", "", path)
    target = re.sub(r"^snip_megatron/", "rooms/", target)
    return re.sub(r"README\.md$", "index.md", target).removesuffix(".md") + ".html"


def prose(text: str) -> Iterator[tuple[bool, str]]:
    """Split Markdown into lines, each with whether it is prose: no code block, no heading."""
    fenced = False
    for line in text.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        yield not (fenced or fence or line.startswith(("    ", "#"))), line
        fenced ^= fence


def links(page: str) -> Iterator[str]:
    """Paths, relative to the repository, of the files that a page links to or names."""
    for is_prose, line in prose((ROOT / page).read_text(encoding="utf-8")):
        for target in re.findall(r"\]\(([^)\s]+)\)", line) if is_prose else ():
            if not re.match(r"[a-z]+:|#", target):
                path = (ROOT / page).parent.joinpath(target.partition("#")[0]).resolve()
                if path.is_file() and path.is_relative_to(ROOT):
                    yield path.relative_to(ROOT).as_posix()
        for name in NAMED.findall(line) if is_prose else ():
            if path := found_path(page, name):
                yield path


NAMED = re.compile(r"(?<!\[)`([\w./-]+\.(?:py|sh|md|json|diff|txt))`(?!\])")
"""A file that a text names as code, outside of a link."""


def found_path(page: str, name: str) -> str | None:
    """The file that ``name`` means in ``page``: beside the page, in the repository or in the package; None: no file."""
    for folder in ((ROOT / page).parent, ROOT, ROOT / "snip_megatron"):
        path = (folder / name).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            return path.relative_to(ROOT).as_posix()
    return None


def linked(markdown: str, page: str) -> str:
    """The text with a link at every file that it names."""

    def link(found: re.Match[str]) -> str:
        path = found_path(page, found[1])
        return (
            found[0] if path in (None, page) else f"[`{found[1]}`]({posixpath.relpath(path, posixpath.dirname(page))})"
        )

    return "".join(NAMED.sub(link, line) if is_prose else line for is_prose, line in prose(markdown))


def spaced(markdown: str) -> str:
    """The text with an empty line before each list and table that follows a paragraph, which Python-Markdown wants."""
    lines: list[str] = []
    within = ""  # what the last line belongs to: "text", "list", "table", or nothing
    for is_prose, line in prose(markdown):
        starts = "table" if line.startswith("|") else "list" if re.match(r"(-|\d+\.) ", line) else ""
        if starts and is_prose and within == "text":
            lines.append("\n")
        within = starts or within or "text" if is_prose and line.strip() else ""
        lines.append(line)
    return "".join(lines)


def listing(path: str) -> str:
    """A page that shows a source file, with an anchor at every line."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    style = (
        "body{margin:1em;color-scheme:light dark}pre{font-size:13px}a{opacity:.5;text-decoration:none;color:inherit}"
    )
    body = "\n".join(f'<a id="{n}" href="#{n}">{n:4}</a>  {html.escape(line)}' for n, line in enumerate(lines, start=1))
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{path}</title><style>{style}</style></head>'
    )
    return f"{head}<body><h1>{path}</h1><pre>{body}</pre></body></html>"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the whole repository."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    found = pages()

    def add(path: str, target: str) -> File:
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=target)

    site = Files([*theme, *(add(page, destination(page)) for page in found)])
    for path in sorted({link for page in found for link in links(page)} - set(found)):
        file = add(path, f"files/{path}" if Path(path).suffix in DATA else f"source/{path}.html")
        if Path(path).suffix not in DATA:
            file.content_string = listing(path)
        site.append(file)
    return site


# -- what is generated ----------------------------------------------------------------------------------------------
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and link the files that are named."""
    path = page.file.src_uri
    if path == "docs/how-it-works.md":
        markdown = re.sub(r"```mermaid\n(.*?)```", lambda found: rooms_picture.svg(found[1]), markdown, flags=re.DOTALL)
    return spaced(linked(markdown, path))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drop the roles of Sphinx in docstrings, such as ``:class:``, which mean nothing here."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):<code>~?", "<code>", content)
