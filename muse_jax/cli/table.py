"""Tables on standard output: drawn by rich on a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
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
