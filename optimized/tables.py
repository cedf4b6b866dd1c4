"""Launch configurations by shape: data, found once by a script, never tuned at run time.

A reduction's splits belong to the numbers: partial sums are added in the order of the splits, so a configuration is chosen by the
shapes of the weights alone, never by the number of rows.
"""

from __future__ import annotations

# rows of a captured step; a batch below its bucket is filled up with padding rows
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# smallest context of a step in tokens; larger ones are powers of two times this. A captured step serves all lengths up to it
MIN_CONTEXT = 128


def row_bucket(n_rows: int, buckets: tuple[int, ...] = ROW_BUCKETS) -> int:
    """The smallest bucket that holds n_rows (the largest one if none does)."""
    return next((b for b in sorted(buckets) if b >= n_rows), max(buckets))


def context_bucket(tokens: int, page_tokens: int, max_pages: int) -> int:
    """Context tokens of a step whose longest run ends at `tokens`: whole pages, at most the pool's."""
    wanted = max(MIN_CONTEXT, page_tokens)
    while wanted < tokens:
        wanted *= 2
    pages = -(-wanted // page_tokens)
    return min(pages, max_pages) * page_tokens


HC_SLICES = 40  # programs of a hyper-connection site along D at one row


def hyper(rows: int) -> tuple[int, int, int]:
    """(rows, channels, warps) of a tile of the expansion and projection."""
    return (8 if rows <= 8 else 16), 64, 2


def row_warps(width: int) -> int:
    """Warps of a program that holds a whole row."""
    return max(1, min(8, width // 512))
