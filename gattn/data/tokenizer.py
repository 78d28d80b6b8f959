"""Text to token ids and back, for the embedded corpus: byte-level BPE trained once and cached, or plain bytes.

The cache lies under `files.cache()/corpus-<fingerprint>/`. Several processes may build it at once: the result does not
depend on who wins, and each file appears whole or not at all. A file that cannot be used is rebuilt with a warning.
The Rust threads of `tokenizers` run only while a cache file is built; worker processes are spawned, never forked.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import decoders, models, pre_tokenizers, trainers

from gattn.data.corpus import Corpus
from gattn.files import cache, write_atomically

BOS = "<|bos|>"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary of byte strings. BOS stands for no text: `encode` never gives it, `decode` skips it."""

    pieces: tuple[bytes, ...]
    """The UTF-8 bytes each id stands for; empty for BOS."""
    bos_id: int
    encode_batch: Callable[[Sequence[str]], list[Int[np.ndarray, " _"]]]
    """Token ids of many texts, int32."""

    @property
    def vocab_size(self) -> int:
        """V: all ids lie below it."""
        return len(self.pieces)

    @cached_property
    def token_bytes(self) -> Int[np.ndarray, " V"]:
        """UTF-8 bytes that each token stands for, 0 for BOS: nats over bytes give bits per byte."""
        return np.array([len(piece) for piece in self.pieces], np.int32)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the vocabulary in the order of the ids (the order of the BPE merges)."""
        return hashlib.sha256(repr((self.bos_id, self.pieces)).encode()).hexdigest()[:16]

    def encode(self, text: str) -> Int[np.ndarray, " _"]:
        """Ids of the text, int32, without BOS; any text can be encoded."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are no UTF-8 (a window may cut a character) become U+FFFD."""
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def label(self, token: int) -> str:
        """One token as printable text, for axes of attention maps: `<bos>`, `·def`, `\\n`, `\\xc3`."""
        if token == self.bos_id:
            return "<bos>"
        text = self.pieces[token].decode("utf-8", errors="backslashreplace").replace(" ", "·")
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def open_tokenizer(kind: Literal["bpe", "bytes"], vocab_size: int, corpus: Corpus) -> Tokenizer:
    """`bytes`: 256 bytes and BOS = 256. `bpe`: at most `vocab_size` ids (>= 257), trained on the train split once."""
    if kind == "bytes":
        return Tokenizer((*(bytes([i]) for i in range(256)), b""), bos_id=256, encode_batch=_encode_bytes)
    path = _cache_folder(corpus) / f"bpe-{vocab_size}.json"
    if path.exists():
        try:
            return _bpe(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), vocab_size)
        except Exception as error:  # `tokenizers` raises bare Exceptions
            _log.warning("%s cannot be used (%s): training the tokenizer again", path, error)
    _log.info("training a BPE tokenizer of %d entries on the corpus (once)", vocab_size)
    model = _train_bpe([document.text for document in corpus.train], vocab_size)
    write_atomically(path, model.to_str())
    return _bpe(model, vocab_size)


def token_stream(tokenizer: Tokenizer, corpus: Corpus, split: Literal["train", "held_out"]) -> Int[np.ndarray, " _"]:
    """The documents of one split as ids, BOS before each, as a read-only memory map of the cache (uint16 or uint32)."""
    documents = corpus.train if split == "train" else corpus.held_out
    path = _cache_folder(corpus) / f"{tokenizer.fingerprint}-{split}.npy"
    if path.exists():
        try:
            return _load_stream(path, tokenizer, len(documents))
        except Exception as error:  # a damaged header fails in many ways
            _log.warning("%s cannot be used (%s): encoding the corpus again", path, error)
    stream = _encode_documents(tokenizer, [document.text for document in documents])
    buffer = io.BytesIO()
    np.save(buffer, stream)
    write_atomically(path, buffer.getvalue())
    return _load_stream(path, tokenizer, len(documents))


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def _train_bpe(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def _bpe(model: tokenizers.Tokenizer, vocab_size: int) -> Tokenizer:
    """Raises ValueError if the model is not one of ours (a cache file that somebody else wrote)."""
    size, bos_id = model.get_vocab_size(), model.token_to_id(BOS)
    if bos_id is None or size > vocab_size:
        raise ValueError(f"{size} entries and BOS = {bos_id}, not at most {vocab_size} with a BOS")
    model.encode_special_tokens = True  # the text '<|bos|>' is seven characters, not the end of a document
    to_byte, letters = _byte_of_letter(), {i: token for token, i in model.get_vocab().items()}
    pieces = [bytes(to_byte[c] for c in letters[i]) if i != bos_id else b"" for i in range(size)]

    def encode_batch(texts):
        return [np.array(e.ids, np.int32) for e in model.encode_batch_fast(list(texts), add_special_tokens=False)]

    return Tokenizer(tuple(pieces), bos_id, encode_batch)


def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    parts = []
    for start in range(0, len(texts), 64):  # the encoder keeps about 100 bytes a token while a batch lives
        for ids in tokenizer.encode_batch(texts[start : start + 64]):
            parts += [np.array([tokenizer.bos_id], dtype), ids.astype(dtype)]
    return np.concatenate(parts)


def _load_stream(path: Path, tokenizer: Tokenizer, num_documents: int) -> np.ndarray:
    """Raises ValueError if the file is cut or is not the stream of that many documents."""
    stream = np.lib.format.open_memmap(path, mode="r")
    if stream.ndim != 1 or stream.dtype.kind != "u" or not len(stream) or stream[0] != tokenizer.bos_id:
        raise ValueError(f"{stream.dtype} array of shape {stream.shape} that does not start with BOS")
    if (found := np.count_nonzero(stream == tokenizer.bos_id)) != num_documents or stream.max() >= tokenizer.vocab_size:
        raise ValueError(f"{found} documents instead of {num_documents}, largest id {stream.max()}")
    return stream


def _cache_folder(corpus: Corpus) -> Path:
    return cache() / f"corpus-{corpus.fingerprint}"
