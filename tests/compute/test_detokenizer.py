"""Joined deltas equal the full decode, for any ids of a byte-level and of a byte-fallback tokenizer."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from swarmnode.compute.detokenizer import IncrementalDetokenizer, Vocabulary

CORPUS = ("Hello there, 你好吗 world. Grüße, 👩‍👩‍👧 and 🙂🙂 again.", "a � b", "the cat sat; il était une fois")


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|eos|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece as in Llama 2: ▁ for spaces, <0xNN> for what the vocabulary lacks, first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁the", "▁cat", "s", "a", "t", "▁a", "é", "你", "�", "▁▁", ".", ","]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁hi", -2.0), ("x", -2.0), ("é", -3.0)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


MAKERS = (byte_level, byte_fallback, metaspace)


def deltas_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(Vocabulary(tokenizer))
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("make", MAKERS)
@given(data=st.data())
def test_joined_deltas_equal_the_full_decode(make: object, data: st.DataObject) -> None:
    tokenizer = make()  # type: ignore[operator]
    # A few more than the vocabulary: models are padded beyond their tokenizer.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=60))
    assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(st.text(max_size=30))
def test_text_comes_back_whole_and_never_as_half_characters(make: object, text: str) -> None:
    tokenizer = make()  # type: ignore[operator]
    deltas = deltas_of(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)
    assert "".join(deltas) == tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("make", MAKERS)
def test_long_random_replies(make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    source = random.Random(5)
    for _ in range(20):
        ids = [source.randrange(tokenizer.get_vocab_size()) for _ in range(400)]
        assert "".join(deltas_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in ("a", "ð", "Ł", "Ļ", "Ĥ")]  # a, then 🙂 byte by byte
    assert deltas_of(tokenizer, ids) == ["a", "", "", "", "🙂", ""]
    assert deltas_of(tokenizer, ids[:-1]) == ["a", "", "", "", "\ufffd"]


def test_the_window_stays_short() -> None:
    """However long the reply and whatever its bytes: each token costs the decode of a few."""
    longest = 0

    class Counting(Vocabulary):
        def decode(self, ids: object) -> str:
            nonlocal longest
            longest = max(longest, len(ids))  # type: ignore[arg-type]
            return super().decode(ids)  # type: ignore[arg-type]

    tokenizer = byte_level()
    for token in ("a", "ð", "Ĥ"):
        detokenizer = IncrementalDetokenizer(Counting(tokenizer))
        for _ in range(300):
            detokenizer.push(tokenizer.token_to_id(token))
    assert longest <= 10
