"""Tables on standard output, drawn by rich on a terminal and aligned plain text elsewhere; progress on a terminal
only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `columns`; every cell is shown as it stands, no markup is read."""
    if sys.stdout.isatty():
        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def progress[T](steps: Iterable[T], total: int, label: str) -> Iterator[T]:
    """`steps` as they come, with a bar on standard error where that is a terminal; elsewhere the caller prints
    lines.
    """
    if not sys.stderr.isatty():
        yield from steps
        return
    yield from track(steps, label, total=total, console=Console(stderr=True), transient=True)
