"""Text to token ids and back: byte-level BPE, plain bytes, or the `tokenizer.json` of others.

For the embedded corpus BPE is trained once and cached under `files.cache()/corpus-<fingerprint>/`. Several processes
may build the cache at once: the result does not depend on who wins, and each file appears whole or not at all. A file
that cannot be used is rebuilt with a warning.
The Rust threads of `tokenizers` run only while a cache file is built; worker processes are spawned, never forked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import decoders, models, pre_tokenizers, trainers

from gattn.config import ConfigError
from gattn.data.corpus import Corpus
from gattn.files import as_path, cache, write_atomically

BOS = "<|bos|>"
_KNOWN_BOS = (BOS, "<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>", "</s>", "[CLS]")  # the first present is taken
_GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what ByteLevel does

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary of byte strings. BOS stands for no text: `encode` never gives it, `decode` skips it."""

    pieces: tuple[bytes, ...]
    """The UTF-8 bytes each id stands for; empty for BOS."""
    bos_id: int
    encode_batch: Callable[[Sequence[str]], list[Int[np.ndarray, " _"]]]
    """Token ids of many texts, int32."""
    encoder: Literal["bytes", "tokenizers", "tiktoken"] = "tokenizers"
    """What computes the ids."""
    definition: str | None = None
    """The `tokenizer.json` it was read from."""
    spelling: str | None = None
    """A `tokenizer.json` that gives the same ids, where there is one; says nothing new."""
    folds_text: bool = False
    """Letters lose case or accents before they are encoded: the pieces are not the bytes of the text."""

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
        """16 hex digits of the vocabulary in the order of the ids (the order of the BPE merges), and of all else that a
        `tokenizer.json` says."""
        known = repr((self.bos_id, self.pieces))
        if self.definition is not None:
            known += json.dumps(json.loads(self.definition), sort_keys=True)
        return hashlib.sha256(known.encode()).hexdigest()[:16]

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


def open_tokenizer(kind: str, vocab_size: int, corpus: Corpus) -> Tokenizer:
    """`bytes`: 256 bytes and BOS = 256. `bpe`: at most `vocab_size` ids (>= 257), trained on the train split once. Any
    other is a path, as `read_tokenizer` takes it."""
    if kind == "bytes":
        return byte_tokenizer()
    if kind != "bpe":
        return read_tokenizer(kind)
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


def byte_tokenizer() -> Tokenizer:
    """256 bytes and BOS = 256."""
    return Tokenizer((*(bytes([i]) for i in range(256)), b""), 256, _encode_bytes, encoder="bytes")


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` ids (>= 257), learned from the texts; `definition` is its file."""
    return parse_tokenizer(_train_bpe(texts, vocab_size).to_str(), BOS)


def read_tokenizer(path: str | os.PathLike[str], bos: str | None = None) -> Tokenizer:
    """The `tokenizer.json` of Hugging Face `tokenizers` at a path, or in the folder at a path.

    Raises:
      ConfigError: `tokenizer`, if it cannot be read; `bos`, if it has no such special token or none is known.
    """
    file = as_path(path)
    try:
        file = file / "tokenizer.json" if file.is_dir() else file
        definition = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(os.fspath(path), error) from error
    return parse_tokenizer(definition, bos, os.fspath(path))


def parse_tokenizer(definition: str, bos: str | None = None, name: str = "tokenizer.json") -> Tokenizer:
    """As `read_tokenizer`, from the file's text. Whatever is no special token of it stands for text, never for control:
    the text `<s>` of a user is three characters."""
    try:
        model = tokenizers.Tokenizer.from_str(definition)
        settings = json.loads(definition)
        pieces = _pieces(model, settings)
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise _unreadable(name, error) from error
    model.encode_special_tokens = True
    model.no_truncation()
    model.no_padding()
    special = {token["content"]: token["id"] for token in settings.get("added_tokens") or () if token["special"]}
    token = bos or next((token for token in _KNOWN_BOS if token in special), None)
    if token not in special:
        one_of = f"name the one that separates documents: {', '.join(special)}"
        none = "the tokenizer has no special token, and one must separate documents: add one to its file"
        raise ConfigError("bos", bos, one_of if special else none)
    folds = {"Lowercase", "StripAccents"} & {part["type"] for part in _parts(settings.get("normalizer"))}
    return Tokenizer(
        tuple(pieces),
        special[token],
        _plain_encoder(model, special),
        definition=definition,
        spelling=definition,
        folds_text=bool(folds),
    )


def fast_encoder(tokenizer: Tokenizer) -> Tokenizer | None:
    """The same tokenizer computed by `tiktoken`, some four times faster, or None where that cannot follow it.

    Byte-level BPE whose merges are ranked by id is followed; that the ids are the same, `agrees` checks on text.
    """
    import tiktoken

    settings = json.loads(tokenizer.definition or "{}")
    pattern = _split_pattern(settings.get("pre_tokenizer"))
    normalizer = settings.get("normalizer")
    ranks = _merge_ranks(settings, tokenizer.pieces)
    if pattern is None or ranks is None or normalizer not in (None, {"type": "NFC"}):
        return None
    try:
        core = tiktoken.Encoding("gattn", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a pattern that its regex engine does not know
        return None
    added = [token["content"] for token in settings.get("added_tokens") or () if not token["special"]]

    def encode(text: str) -> np.ndarray:
        ready = unicodedata.normalize("NFC", text) if normalizer else text
        if any(content in text or content in ready for content in added):
            return tokenizer.encode(text)
        try:
            return core.encode_to_numpy(ready, disallowed_special=()).astype(np.int32)
        except ValueError:  # its regex engine gives up on a million spaces in a row
            return tokenizer.encode(text)

    return dataclasses.replace(tokenizer, encode_batch=lambda texts: [encode(t) for t in texts], encoder="tiktoken")


def agrees(tokenizer: Tokenizer, other: Tokenizer, texts: Sequence[str]) -> bool:
    """Whether both give the same ids for the texts and for the text of each piece."""
    pieces = [piece.decode("utf-8", errors="ignore") for piece in tokenizer.pieces]
    for start in range(0, len(texts), 64):
        batch = [*texts[start : start + 64]]
        pairs = zip(tokenizer.encode_batch(batch), other.encode_batch(batch), strict=True)
        if not all(np.array_equal(a, b) for a, b in pairs):
            return False
    pairs = zip(tokenizer.encode_batch(pieces), other.encode_batch(pieces), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _unreadable(name: str, error: Exception) -> ConfigError:
    remedy = "give a tokenizer.json of Hugging Face `tokenizers` or its folder (convert other formats to it)"
    return ConfigError("tokenizer", name, f"cannot be read as a tokenizer ({error}): {remedy}")


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder and all that a Sequence of them holds."""
    if isinstance(component, dict):
        yield component
        for key in ("normalizers", "pretokenizers", "decoders"):
            for part in component.get(key) or ():
                yield from _parts(part)


def _pieces(model: tokenizers.Tokenizer, settings: dict[str, Any]) -> list[bytes]:
    """The bytes of each id as its decoder would spell them; none for special tokens and for ids that are not there."""
    added = {token["id"]: token for token in settings.get("added_tokens") or ()}
    parts = [part for key in ("normalizer", "pre_tokenizer", "decoder") for part in _parts(settings.get(key))]
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    to_byte = _byte_of_letter()
    prefix, suffix = (settings["model"].get(f"{k}") or "" for k in ("continuing_subword_prefix", "end_of_word_suffix"))

    def spell(token: str) -> bytes:
        if byte_level and all(letter in to_byte for letter in token):
            return bytes(to_byte[letter] for letter in token)
        if settings["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if suffix and token.endswith(suffix):
            token = token[: -len(suffix)] + " "
        return token.removeprefix(prefix).replace("▁", " ").encode()

    vocabulary = model.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        pieces[i] = spell(token) if i not in added else b"" if added[i]["special"] else token.encode()
    return pieces


def _plain_encoder(model: tokenizers.Tokenizer, special: dict[str, int]) -> Callable[[Sequence[str]], list[np.ndarray]]:
    control = {token: i for token, i in special.items() if len(token) > 1}
    # Unigram finds its control tokens in plain text too: there the text is cut behind their first letter (which may
    # cost a space, as at the beginning of any text).
    inside = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in control) or "(?!)")

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        found = [np.array(e.ids, np.int32) for e in model.encode_batch_fast(list(texts), add_special_tokens=False)]
        for i, text in enumerate(texts):
            if any(token in text and (found[i] == control[token]).any() for token in control):
                found[i] = np.concatenate(encode_batch(inside.split(text)))
        return found

    return encode_batch


def _split_pattern(pre_tokenizer: Any) -> str | None:
    """The regular expression that cuts text before byte-level merging, None if there is more to it."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2_SPLIT
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _merge_ranks(settings: dict[str, Any], pieces: tuple[bytes, ...]) -> dict[bytes, int] | None:
    """Bytes -> id of byte-level BPE; None unless all bytes are there and its merges say: the lowest id first."""
    model = settings.get("model", {})
    if model.get("type") != "BPE" or any(
        model.get(key)
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = [vocabulary["".join(merge)] for merge in merges]
    added = {token["id"] for token in settings.get("added_tokens") or ()}
    ranks = {pieces[i]: i for i in vocabulary.values() if i not in added}
    reachable = model.get("ignore_merges") or {i for piece, i in ranks.items() if len(piece) > 1} <= set(made)
    if made != sorted(made) or not reachable or not all(bytes([b]) in ranks for b in range(256)):
        return None
    return ranks


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

    return Tokenizer(tuple(pieces), bos_id, encode_batch, spelling=model.to_str())


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
