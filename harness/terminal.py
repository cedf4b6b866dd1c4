"""Where commands print: one console with the width of the terminal, or wide enough for tables in a pipe or a log."""

from __future__ import annotations

import os

from rich import box
from rich.console import Console
from rich.table import Table

LOG_WIDTH = 160  # columns where nobody says how wide the output is


def console(*, stderr: bool = False) -> Console:
    found = Console(stderr=stderr)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found = Console(stderr=stderr, width=LOG_WIDTH)
    return found


def new_table(title: str = "") -> Table:
    return Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
