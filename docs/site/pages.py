"""What mkdocs makes a site of: the pages of the repository, where they lie, and the files that they link to. Nothing is written
twice."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def sources() -> list[Path]:
    """The pages."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]


def linked(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to."""
    for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and path.suffix != ".md":
            yield path


def slug(heading: str, separator: str) -> str:
    """An anchor as GitHub makes it: links work in both places."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", separator)


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"] = {"slugify": slug}
    return config


def on_files(files: Files, config: Any) -> Files:
    pages = sources()
    for path in sorted({*pages, *(path for page in pages for path in linked(page))}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """A folder is no page: its name stays, the link goes."""
    folder = (ROOT / page.file.src_uri).parent

    def flat(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    return LINK.sub(flat, markdown)
