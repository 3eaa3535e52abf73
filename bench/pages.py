"""Pages of docs/: tables, and blocks between `<!-- NAME -->` and `<!-- /NAME -->`."""

from collections.abc import Callable, Mapping

__all__ = ["markdown", "render"]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "·") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def render(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with every block as in the source."""
    for name, block in blocks.items():
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"\n<!-- /{name} -->")
        assert opening, f"the page has no block {name}"
        assert closing, f"the block {name} does not end"
        page = before + opening + block() + closing + after
    return page
