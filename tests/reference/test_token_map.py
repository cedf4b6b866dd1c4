"""The token map: which tokens share a compressed id, and how the ids are handed out."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.errors import WeightsError
from reference.token_map import build_token_map, build_token_map_from, normalize, token_map_from_tokenizer

TEXTS = st.text(alphabet=st.sampled_from("aAbBéÉ \t\n ﬁfiΣσς\ufffd\ue000\u0301Å中1①"), max_size=4)
TOKENS = st.lists(st.tuples(TEXTS, st.text(max_size=3)), max_size=30)


def ids(*texts: str) -> list[int]:
    return build_token_map([(text, text) for text in texts]).tolist()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("Hello", "hello", " HELLO", "hello\n"), [0, 0, 0, 0]),
        (("é", "e", "e\u0301", "É"), [0, 0, 0, 0]),
        (("ﬁ", "fi", "①", "1"), [0, 0, 1, 1]),
        (("a b", "a  b", "a\n\t b", "ab"), [0, 0, 0, 1]),
        ((" ", "", "\n\n", "\t"), [0, 1, 0, 0]),
        (("Σ", "σ", "ΑΣ", "ας"), [0, 0, 1, 2]),
        (("\u0301", "\u0300", " \u0301"), [0, 1, 2]),
        (("a\x1c", "a", "a\x85", "a\u2003"), [0, 1, 1, 1]),  # U+001C is no white space, U+0085 is
        (("a\ue000", "a ", "\ue000", " "), [0, 1, 2, 2]),  # the character set aside is a space to the hash
    ],
)
def test_what_shares_an_id(texts, expected):
    assert ids(*texts) == expected


def test_empty_and_lone_space_are_kept_apart():
    assert normalize(" ") == normalize(" \n\t ") == " " and normalize("") == ""
    assert len(set(ids(" ", "", "a"))) == 3


def test_pieces_of_no_whole_character_are_keyed_as_spelt():
    tokens = [("\ufffd", "<0xE4>"), ("\ufffd", "<0xB8>"), ("a\ufffd", "<0xE4>"), ("A", "A"), ("a", "a")]
    assert build_token_map(tokens).tolist() == [0, 1, 0, 2, 2]


@given(TOKENS)
def test_ids_are_dense_and_first_seen(tokens):
    token_map = build_token_map(tokens).tolist()
    seen = -1
    for identity in token_map:
        assert 0 <= identity <= seen + 1
        seen = max(seen, identity)
    # the map of a prefix is the prefix of the map
    assert build_token_map(tokens[: len(tokens) // 2]).tolist() == token_map[: len(tokens) // 2]


@given(TEXTS.filter(lambda text: "\ue000" not in text))
def test_normalising_again_changes_nothing(text):
    once = normalize(text)
    assert normalize(once) == once
    assert not any(unicodedata.category(c) == "Mn" for c in once)
    assert once == " " or once == once.strip()


def write_tokenizer(folder, vocab: dict[str, int], added=(), decoder=("ByteLevel",)):
    content = {
        "model": {"vocab": vocab},
        "added_tokens": [{"id": i, "content": text} for i, text in added],
        "decoder": {"type": "Sequence", "decoders": [{"type": kind} for kind in decoder]},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_a_byte_level_tokenizer(tmp_path):
    # Ġ is the space, Ã© are the two bytes of é, ä is the first byte of a longer character
    vocab = {"Hello": 1, "Ġhello": 2, "Ã©": 3, "e": 4, "ä": 5, "å": 6, "Ġ": 7, "Ċ": 8}
    path = write_tokenizer(tmp_path, vocab, added=[(0, "<bos>"), (9, "<BOS>")])
    assert token_map_from_tokenizer(path).tolist() == [0, 1, 1, 2, 2, 3, 4, 5, 5, 0]
    decoded = ["<bos>", "Hello", " hello", "é", "e", "\ufffd", "\ufffd", " ", "\n", "<BOS>"]
    pieces = {i: piece for piece, i in vocab.items()} | {0: "<bos>", 9: "<BOS>"}
    same = build_token_map_from(10, decoded.__getitem__, pieces.__getitem__)
    assert same.tolist() == token_map_from_tokenizer(path).tolist()


def test_other_tokenizers_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="ByteLevel"):
        token_map_from_tokenizer(write_tokenizer(tmp_path, {"a": 0}, decoder=("Metaspace",)))
    with pytest.raises(WeightsError, match=r"tokens 0\.\.2"):
        token_map_from_tokenizer(write_tokenizer(tmp_path, {"a": 0, "b": 2}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"model\.vocab"):
        token_map_from_tokenizer(tmp_path / "tokenizer.json")
