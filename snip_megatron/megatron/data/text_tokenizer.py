"""Byte-level tokenizers that Megatron's HuggingFaceTokenizer loads from a local folder, without network access."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from snip_megatron.precision.errors import needs_extra

with needs_extra("text", "a tokenizer"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
BYTES = 256


def byte_symbols() -> list[str]:
    """Return the printable character for each byte value in byte-level vocabularies, as defined by GPT-2.

    Printable Latin-1 characters represent themselves. The other byte values map to U+0100 and following, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES))
    return [chr(value) if value in printable else chr(BYTES + next(others)) for value in range(BYTES)]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with at most ``vocab_size`` tokens, including the end-of-document token (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=byte_symbols(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, whose id is the byte's value. End of document is 256."""
    vocabulary = {symbol: value for value, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[NDArray[np.int64]]:
    """Return the token ids of each text, int64 [tokens], followed by the end-of-document id.

    If a text contains the characters of the end-of-document token, they are encoded as bytes.
    """
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    if tokenizer.get_vocab_size() == BYTES + 1 and end == BYTES:  # byte_tokenizer(), whose ids are the bytes
        return [np.append(np.frombuffer(text.encode(), np.uint8).astype(np.int64), end) for text in texts]
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray([*encoding.ids, end], dtype=np.int64) for encoding in encodings]


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, from which transformers' AutoTokenizer loads it."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
    text = json.dumps(configuration, indent=1, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
