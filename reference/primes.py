"""The moduli of the n-gram hash: primes that no layer, order or head shares with another.

For each Engram layer in order and each n-gram order, start at `vocab_size - 1` and hand out the next primes
strictly above that nobody has taken yet. The start is not moved, so in effect all are consecutive primes.
"""

from __future__ import annotations

from functools import lru_cache


def is_prime(n: int) -> bool:
    """Trial division; the released moduli are near 16 million, so at most 2,000 odd divisors."""
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 2
    return True


@lru_cache(maxsize=32)
def engram_primes(
    n_layers: int, max_ngram_size: int, n_heads: int, vocab_size: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Moduli as [layer][order - 2][head], layers in the order of `engram_layer_ids`."""
    taken: set[int] = set()
    layers = []
    for _ in range(n_layers):
        orders = []
        for _ in range(2, max_ngram_size + 1):
            heads: list[int] = []
            candidate = vocab_size - 1
            while len(heads) < n_heads:
                candidate += 1
                if candidate not in taken and is_prime(candidate):
                    taken.add(candidate)
                    heads.append(candidate)
            orders.append(tuple(heads))
        layers.append(tuple(orders))
    return tuple(layers)
