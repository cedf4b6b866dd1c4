"""Launch configurations by shape: data, found once by a script, never tuned at run time.

A reduction's splits belong to the numbers: partial sums are added in the order of the splits, so a
configuration is chosen by the
shapes of the weights alone, never by the number of rows.
"""

from __future__ import annotations

from functools import cache

# rows of a captured step; a batch below its bucket is filled up with padding rows
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# smallest context of a step in tokens; larger ones are powers of two times this. A captured step serves
# all lengths up to it
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


# kernels: a sum's order may depend on the tile of K and on the splits below, which follow (kind, K) or the
# width alone; tiles of rows and
# of outputs may follow the number of rows

BK_LIMIT = {"fp4": 256, "fp8": 128, "bf16": 128, "fp32": 64}  # columns of one step along K


def k_tile(kind: str, k: int) -> int:
    """Largest power of two within the limit that divides K; 32 at least, a quantiser's group."""
    bk = 32
    while bk < BK_LIMIT[kind] and k % (2 * bk) == 0:
        bk *= 2
    return bk


def row_tile(rows: int) -> int:
    """Rows of one tile: 8 is the matrix unit's side, 64 the most that its registers hold."""
    return min(64, max(8, 1 << (rows - 1).bit_length()))


MEETING_QUERIES = 16  # the same for the parts of a query's list
MEETING_ROWS = 128  # up to here the parts of a long sum are programs of their own
PARTS, TILES = 1 << 17, 4096  # partial sums a row of a product, tiles: what the scratch holds
CHAIN = 10  # steps along K that one program adds up at most, where the grid isn't full anyway


@cache
def product(kind: str, n: int, k: int, rows: int, groups: int = 1) -> tuple[int, int, int, int, int, int]:
    """(BN, BM, BK, parts of K, warps, stages) of `groups` products with [N, K] each."""
    bm, bk = row_tile(rows), k_tile(kind, k)
    bn = 64 if bm >= 32 or n * groups >= 4096 else 32
    return bn, bm, bk, k_parts(kind, n * groups, k), 2, 3


def k_parts(kind: str, n: int, k: int) -> int:
    """Parts of a sum over K, a divisor of its steps: at most CHAIN steps each, fewer where N alone leaves
    the GPU empty."""
    steps = k // k_tile(kind, k)
    tiles = -(-n // 64)
    filling = min(-(-steps // 2), -(-264 // tiles))
    wanted = min(max(-(-steps // CHAIN), filling), max(1, 1300 // tiles), 20)
    return next(p for p in range(wanted, steps + 1) if steps % p == 0)


UNSHARED_ROWS = 4  # up to here every slot is a tile of its own: two rows rarely choose one of 384 experts


def expert_tiles(rows: int, top_k: int, experts: int) -> tuple[int, bool]:
    """(rows of a tile, are tiles listed by expert?) of the grouped expert products."""
    slots = rows * top_k
    if rows <= 8:
        return 8, False
    if slots <= 4 * experts:
        return 8, True
    return (32 if slots >= 16 * experts else 16), True


def expert_launch(bm: int) -> tuple[int, int, int]:
    """(outputs of a tile, warps, stages). Four warps only where a tile of rows is too small for the
    warp-group instruction."""
    return 64, (4 if bm == 8 else 2), 3


def hyper_splits(width: int) -> int:
    """Partial results of a site's projection along D: programs at one row. Part of the sum's order."""
    return max(1, width // 64)


def hyper(rows: int) -> tuple[int, int, int]:
    """(rows, channels, warps) of a tile of the expansion and projection."""
    return (8 if rows <= 8 else 16), 32, 2


def row_warps(width: int) -> int:
    """Warps of a program that holds a whole row."""
    return max(1, min(8, width // 512))


def attention(width: int) -> tuple[int, int, int, int]:
    """(channel pairs of a step of the scores, of a slice of the values, blocks of a part of the list, warps).

    None may follow the number of rows: a softmax's sum has the order of its tile's layout.
    """
    half = width // 2
    return min(64, half), min(32, half), 2, 4


SCORE_KEYS = 128  # index keys of one program


SELECTION_ONCE = 8192  # scores of a row that one program holds
SELECTION_CHUNK = 4096  # scores of one of several programs


def scan_warps(rows: int) -> int:
    return max(1, min(16, rows // 512))
