"""Compressed token ids for the n-gram hash, from a tokenizer's texts (numeric contract, section 6).

    text with U+FFFD (a piece that is no whole character)   key = the raw piece
    otherwise                                               key = normalised text, or the text itself if that is empty

    normalise: NFKC, NFD, drop accents (category Mn), lowercase, each run of [ \\t\\r\\n] becomes one space,
    a lone space is set aside as a private-use character, strip, the private-use character becomes a space
    again

Ids are handed out in the order in which keys are first seen: dense, and each is met after all smaller ones.
Tokens that differ in case, accents or surrounding whitespace share an id; the lone space and the empty text
do not.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from reference.errors import WeightsError

REPLACEMENT = "\ufffd"
LONE_SPACE = "\ue000"
# Unicode's White_Space; Python's own strip takes the separators U+001C to U+001F too
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
WHITESPACE_RUN = re.compile(r"[ \t\r\n]+")


def normalize(text: str) -> str:
    """What tokens that mean the same to the hash have in common."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # lowercase letter by letter: a final sigma has no context here
    text = "".join(c.lower() for c in text if unicodedata.category(c) != "Mn")
    text = WHITESPACE_RUN.sub(" ", text)
    if text == " ":
        text = LONE_SPACE
    return text.strip(WHITE_SPACE).replace(LONE_SPACE, " ")


def token_key(text: str, piece: str) -> str:
    """The key of one token: `text` as decoded alone, `piece` as the vocabulary spells it."""
    if REPLACEMENT in text:
        return piece
    return normalize(text) or text


def build_token_map(tokens: Iterable[tuple[str, str]]) -> Tensor:
    """(decoded text, raw piece) of token 0, 1, 2, ... -> int64 [vocab] of compressed ids in first-seen order."""
    ids: dict[str, int] = {}
    return torch.tensor(
        [ids.setdefault(token_key(text, piece), len(ids)) for text, piece in tokens], dtype=torch.int64
    )


def build_token_map_from(
    vocab_size: int, decode: Callable[[int], str], id_to_token: Callable[[int], str]
) -> Tensor:
    """The same from a tokenizer's two functions; decode(i) is the text of token i alone, special tokens kept."""
    return build_token_map((decode(i), id_to_token(i)) for i in range(vocab_size))


def token_map_from_tokenizer(path: str | Path) -> Tensor:
    """From a tokenizer.json with a byte-level vocabulary. Raises WeightsError for a file of another kind."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        pieces = {int(i): str(piece) for piece, i in content["model"]["vocab"].items()}
        added = {int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens", ())}
        decoder = content.get("decoder") or {}
        kinds = [decoder.get("type"), *(d.get("type") for d in decoder.get("decoders", ()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        words = "a tokenizer.json with model.vocab"
        raise WeightsError(field=str(path), expected=words, actual=repr(error)) from error
    if "ByteLevel" not in kinds:
        hint = "decode the tokens with their own tokenizer and call build_token_map"
        raise WeightsError(field=f"{path}: decoder", expected="ByteLevel", actual=kinds, hint=hint)
    size = 1 + max((*pieces, *added), default=-1)
    missing = [i for i in range(size) if i not in pieces and i not in added]
    if missing:
        raise WeightsError(
            field=str(path), expected=f"tokens 0..{size - 1}", actual=f"none for {missing[:5]}"
        )
    byte_of = _byte_of_character()

    def text(i: int) -> str:
        if i in added:
            return added[i]
        try:
            return bytes(byte_of[c] for c in pieces[i]).decode("utf-8", errors="replace")
        except KeyError:  # a piece outside the byte alphabet stands for itself
            return pieces[i]

    return build_token_map_from(size, text, lambda i: added.get(i, pieces.get(i, "")))


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for 256, 257, ... in
    order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
