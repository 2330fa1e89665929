"""Plain text tables, good in a terminal, a log and a mail alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table_text(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2, left: int = 1, words_last: bool = False
) -> str:
    """Columns padded to their widest cell.

    Args:
        headers: Column titles.
        rows: Cells, one per column title.
        indent: Spaces before every line.
        left: Number of first columns that are left-aligned (words); the others are right-aligned (numbers).
        words_last: Left-align the last column too.

    >>> print(format_table_text(["rank", "wait"], [["0", "1.2 ms"], ["1-3", "10 ms"]], indent=0))
    rank    wait
    0     1.2 ms
    1-3    10 ms
    """
    lines = [list(headers), *(list(row) for row in rows)]
    last = len(headers) - 1
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        (
            " " * indent
            + "  ".join(
                cell.ljust(width) if column < left or (words_last and column == last) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        ).rstrip()
        for line in lines
    )


def format_table_markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column is left-aligned, the others are right-aligned."""
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as ranges.

    >>> format_ranks([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
