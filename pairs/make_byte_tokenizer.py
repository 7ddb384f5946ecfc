# SPDX-License-Identifier: Apache-2.0
"""Writes the byte tokenizer that lets ``vllm serve`` speak text with the byte pairs.

    python pairs/make_byte_tokenizer.py pairs/bytes4/target

Ids 0..255 are bytes, 256 begins a text, 257 ends one, 287 is the draft's mask; those
between are unused. No merges, so a text's ids are its UTF-8 bytes.
"""

import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 288
NUM_BYTES = 256
NAMES = {256: "<bos>", 257: "<eos>", 287: "<mask>"}


def byte_symbols() -> list[str]:
    """The printable stand-in for each byte that byte-level BPE uses.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the
    characters from U+0100 on.
    """
    symbols, spare = [], NUM_BYTES
    for byte in range(NUM_BYTES):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
        symbols.append(chr(byte) if printable else chr(spare))
        spare += not printable
    assert set(symbols) == set(pre_tokenizers.ByteLevel.alphabet())
    return symbols


def build() -> PreTrainedTokenizerFast:
    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(NAMES.get(i, f"<unused{i}>"), special=True, normalized=False)
            for i in range(NUM_BYTES, VOCAB_SIZE)
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    tokenizer = build()
    sample = "naïve = {'a': [1, 2]}\n\tdef f():\x00 → 日本 ÿ"
    ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
    assert ids == list(sample.encode())
    assert tokenizer.decode(ids) == sample
    assert len(tokenizer) == VOCAB_SIZE
    tokenizer.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
