"""RULER (arXiv 2404.06654): thirteen tasks that plant answers in a long text, and `ruler-mini` for small models.

A sample is a prompt that fills a length to within 1%, the new tokens included, whatever the tokenizer: the length of
its haystack is found by counting. Tasks, their parameters, answers and scores are RULER's; the prompts' wording and the
words are ours, so that scores compare with each other and not digit for digit with those of others.

| task | haystack | keys, values, queries | asked |
| --- | --- | --- | --- |
| niah_single_1, 2, 3 | noise, essay, essay | 1, 1, 1 | a number, a number, a uuid |
| niah_multikey_1 | essay | 4, 1, 1 | a number |
| niah_multikey_2, 3 | other needles | all, 1, 1 | a number by words, a uuid by uuid |
| niah_multivalue | essay | 1, 4, 1 | four numbers |
| niah_multiquery | essay | 4, 1, 4 | four numbers |
| vt | noise | a chain of 4 hops | five variables |
| cwe | a list | 10 words 30 times, others 3 (6 and 1 below 4096) | the ten words |
| fwe | coded words | zeta 2.0 over length / 50 words | ranks 2 to 4 |
| qa_1, qa_2 | paragraphs | a file in SQuAD's format each | an answer |

`ruler-mini` asks the same in few characters: `mini_single`, `mini_multikey` (8 keys), `mini_multivalue` (2 values), and
`mini_vt` (2 hops), in lower-case letters, digits, `=`, `?` and spaces, for lengths from 256 on. `CHANCE`: percent
for one who knows the form and draws digits, or, of several keys, one of their values.
"""

from __future__ import annotations

import itertools
import json
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gattn.config import ConfigError

Count = Callable[[str], int]
"""Tokens of a text, BOS not counted."""

ADJECTIVES = """able amber ample arctic azure bitter blunt bold brave brief bright brisk broad calm candid clever coarse
cosmic crisp curly daring deep dense dim distant dry dusty eager early elastic elder empty exact faint famous fancy fast
fertile fierce final flat fluent formal frail fresh frosty gentle giant glad golden grand great green grim happy harsh
hasty heavy hidden hollow honest humble icy idle inner iron jolly keen kind large late lazy lean light little lively
local lone loose loud lucky mellow mighty mild misty modest narrow neat noble odd open pale patient plain polite proud
quick quiet rapid rare rough round royal rusty sharp shiny silent simple sleepy slim slow smooth""".split()  # noqa: SIM905
NOUNS = """anchor apple arrow badger barrel basket beacon beaver bell bottle bridge bucket cabin camel candle canyon
carpet castle cedar cherry circle cloud clover coast comet copper coral cradle crane cricket crown dagger desert diamond
dolphin dragon eagle ember engine falcon feather fiddle forest fossil fountain garden ginger glacier goose hammer harbor
hazel helmet heron island ivory jacket jaguar kettle ladder lantern lemon lizard lobster magnet maple marble meadow
mirror monkey mountain needle ocean olive orchid otter oyster paddle panther parrot pebble pepper pigeon pillow planet
pocket quarry rabbit raven ribbon river rocket saddle salmon shadow silver spider spoon""".split()  # noqa: SIM905
NOISE = "The river is long. The field is wide. The night was cold. We walk on. Up the hill and down.".split()  # noqa: SIM905
LETTERS, FILLERS, DIGITS = "abcdefghijkl", "mnopqrstuvwxyz", "0123456789"  # of ruler-mini: keys, noise, values
DEPTHS = 40
FIRST_GUESS = 200  # units of a haystack, from which their size is told
MANY = 5000  # from there on a name is two pairs of words: of one there are some ten thousand

OFFICIAL = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
MINI = ("mini_single", "mini_multikey", "mini_multivalue", "mini_vt")
MINI_KEYS, MINI_VALUES, MINI_HOPS = 8, 2, 2
CHANCE = {"mini_single": 0.1, "mini_multikey": 100 / MINI_KEYS, "mini_multivalue": 0.1, "mini_vt": 0.1}


@dataclass(frozen=True)
class Sample:
    """A prompt up to where the answer begins."""

    task: str
    prompt: str
    answers: tuple[str, ...]
    new_tokens: int
    """That the answer may have; they are part of the length."""


@dataclass(frozen=True)
class Material:
    """What prompts are made of beside random words."""

    essay: str = ""
    """Any text, for the five tasks with an essay."""
    questions: tuple[Path | None, Path | None] = (None, None)
    """Files in SQuAD's format, of qa_1 and qa_2."""


def samples(task: str, length: int, count: int, tokens: Count, material: Material, seed: int = 0) -> list[Sample]:
    """`count` samples of `length` tokens by `tokens`, the new ones included; the same for the same arguments.

    Raises:
      ConfigError: unknown task, a length that is too short for it, or material that is missing or cannot be read.
    """
    if task not in TASKS:
        raise ConfigError("tasks", task, f"no such task; known: {', '.join(TASKS)}")
    if task in ESSAYS and not material.essay.split():
        raise ConfigError("essay", "", f"{task} needs a text to hide its needles in")
    if task.startswith("qa") and material.questions[task == "qa_2"] is None:
        raise ConfigError(task.replace("_", "-"), "", f"{task} needs a file in SQuAD's format: leave the task out")
    made = []
    for i in range(count):
        rng = random.Random(f"{seed} {task} {length} {i}")
        new_tokens, (build, answers) = NEW_TOKENS[task], TASKS[task](rng, length, material)
        prompt = _fitted(build, length - new_tokens, tokens)
        if prompt is None:
            raise ConfigError("lengths", length, f"too short for {task}: its question and {new_tokens} new tokens")
        made.append(Sample(task, prompt, tuple(answers), new_tokens))
    return made


def score(sample: Sample, answer: str) -> float:
    """0 to 1, RULER's: for qa 1 where any reference is in the answer, else the share of references that are; without
    regard to case."""
    found = [reference.lower() in answer.lower() for reference in sample.answers]
    return float(any(found)) if sample.task.startswith("qa") else sum(found) / len(found)


# ---- lengths ----------------------------------------------------------------------------------------------------

Build = Callable[[int], str]
"""The prompt with a haystack of so many units; longer with more."""


def _fitted(build: Build, target: int, count: Count) -> str | None:
    """The longest prompt of at most `target` tokens; None where even the one without a haystack is longer.

    Tokens grow almost as the units do, so the next guess is on the line through the two nearest known ones.
    """
    low = 0
    least = base = count(build(0))
    if base > target:
        return None
    high, most = None, 0
    guess = FIRST_GUESS
    while high is None or high - low > 1:
        found = count(build(guess))
        if found > target:
            high, most = guess, found
        else:
            low, least = guess, found
        if high is None:
            slope = max(1e-6, (least - base) / low)
            guess = low + max(1, int((target - least) / slope * 1.02) + 1)
        else:
            if target - least <= 0.001 * target:
                break
            share = (target - least) / max(1, most - least)
            guess = min(max(low + int((high - low) * share), low + 1), high - 1)
    return build(low)


# ---- the haystacks ----------------------------------------------------------------------------------------------


def _pair(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _distinct(draw: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@cache
def _words(text: str) -> list[str]:
    return text.split()


def _stream(words: Sequence[str], start: int, count: int) -> list[str]:
    """So many words from `start` on, beginning again at the end."""
    start %= len(words)
    found = list(words[start : start + count])
    while len(found) < count:
        found += words[: count - len(found)]
    return found


def _hidden(words: list[str], needles: Sequence[str], depths: Sequence[float], at_sentences: bool) -> str:
    """The text of words with each needle at its depth (0 the beginning, 1 the end)."""
    pieces, done = [], 0
    for depth, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0]):
        place = round(depth * len(words))
        while at_sentences and 0 < place < len(words) and not words[place - 1].endswith("."):
            place += 1
        pieces += [" ".join(words[done:place]), needle]
        done = max(place, done)
    return " ".join(part for part in (*pieces, " ".join(words[done:])) if part)


def _depths(rng: random.Random, count: int) -> list[float]:
    """Of `DEPTHS` evenly spaced ones, both ends among them."""
    return [rng.randrange(DEPTHS) / (DEPTHS - 1) for _ in range(count)]


# ---- the tasks --------------------------------------------------------------------------------------------------

Made = tuple[Build, list[str]]
"""The prompt by the size of its haystack, and the answers."""


def _niah(
    haystack: str, kind: str, keys: int = 1, values: int = 1, queries: int = 1, key: Callable = _pair
) -> Callable[[random.Random, int, Material], Made]:
    """Needles that give `values` things of a kind for each of `keys` names, `queries` of which are asked for."""
    draw = _uuid if kind == "uuid" else _number

    def needle(name: str, value: str) -> str:
        return f"The secret {kind} of {name} is {value}."

    def make(rng: random.Random, length: int, material: Material) -> Made:
        names = _distinct(lambda: key(rng), keys)
        given = {name: _distinct(lambda: draw(rng), values) for name in names}
        needles = [needle(name, value) for name in names for value in given[name]]
        depths, asked = _depths(rng, len(needles)), names[:queries]
        answers = [value for name in asked for value in given[name]]
        start, others = rng.randrange(10**6), random.Random(rng.random())
        more: dict[str, Any] = dict.fromkeys(names)  # then the other needles of that haystack

        def build(size: int) -> str:
            if haystack == "needles":
                while len(more) - len(names) < size:
                    more.setdefault(key(others) if len(more) < MANY else f"{key(others)}-{key(others)}", draw(others))
                shown = itertools.islice(more.items(), len(names), len(names) + size)
                text = _hidden([needle(*one) for one in shown], needles, depths, at_sentences=False)
            else:
                words = NOISE if haystack == "noise" else _words(material.essay)
                text = _hidden(_stream(words, start, size), needles, depths, at_sentences=haystack == "noise")
            things = f"{kind}s" if len(answers) > 1 else kind
            whose = " and ".join(asked)
            return (
                f"Secret {kind}s are hidden in the following text. Remember them: you will be asked for them.\n{text}\n"
                f"Question: what {'are' if len(answers) > 1 else 'is'} the secret {things} of {whose} in the text?\n"
                f"Answer: the secret {things} of {whose} {'are' if len(answers) > 1 else 'is'}"
            )

        return build, answers

    return make


def _chain(rng: random.Random, hops: int) -> tuple[list[str], list[str], str]:
    """Names, the lines that assign them one from the other, and the value."""
    names = _distinct(lambda: "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5)), hops + 1)
    value = str(rng.randint(10_000, 99_999))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return names, [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)], value


def _vt(rng: random.Random, length: int, material: Material) -> Made:
    def text(names: Sequence[str], lines: Sequence[str], value: str, depths: Sequence[float], size: int) -> str:
        hidden = _hidden(_stream(NOISE, 0, size), [f"{line}." for line in lines], sorted(depths), at_sentences=True)
        return (
            f"{hidden}\nQuestion: which variables have the value {value} in the text above?\n"
            f"Answer: the {len(names)} variables with the value {value} are"
        )

    example, chain = _chain(rng, 4), _chain(rng, 4)
    first, depths = [sorted(_depths(rng, 5)) for _ in range(2)]

    def build(size: int) -> str:
        return (
            "Variables get values in the following texts, from numbers or from each other. Follow them.\n\n"
            f"{text(*example, first, 40)} {' '.join(example[0])}\n\n{text(*chain, depths, size)}"
        )

    return build, chain[0]


def _cwe(rng: random.Random, length: int, material: Material) -> Made:
    often, seldom = (30, 3) if length + 1 >= 4096 else (6, 1)  # BOS is counted
    common = _distinct(lambda: _pair(rng), 10)
    shown = _distinct(lambda: _pair(rng), 10)
    seed, draw = rng.random(), random.Random(rng.random())
    other = dict.fromkeys(common)  # then the others, in the order in which they come

    def listed(words: Sequence[str]) -> str:
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))

    def ask(words: Sequence[str]) -> str:
        return (
            f"{listed(words)}\nQuestion: which ten words are most frequent in the list above?\n"
            "Answer: the ten most frequent words are"
        )

    example = [*shown * 3, *(_pair(rng) for _ in range(10))]
    rng.shuffle(example)

    def build(size: int) -> str:
        needed = -(-size // seldom)
        while len(other) - len(common) < needed:
            other[_pair(draw) if len(other) < MANY else f"{_pair(draw)}-{_pair(draw)}"] = None
        more = list(itertools.islice(other, len(common), len(common) + needed))
        words = [*common * often, *(more * seldom)[:size]]
        random.Random(seed).shuffle(words)
        return (
            "The following lists have some words that come often and others that come seldom. Remember the ten that "
            f"come most often.\n\n{ask(example)} {listed(shown)}\n\n{ask(words)}"
        )

    return build, common


def _fwe(rng: random.Random, length: int, material: Material) -> Made:
    coded = _distinct(lambda: "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6)), max(4, length // 50))
    total, seed = sum(rank**-2.0 for rank in range(1, len(coded) + 1)), rng.random()

    def build(size: int) -> str:
        counts = [int(size * (rank**-2.0) / total) for rank in range(1, len(coded) + 1)]
        for rank in range(3, -1, -1):  # a short text, too, has each of these more often than the next
            counts[rank] = max(counts[rank], counts[rank + 1] + 1 if rank + 1 < len(counts) else 1)
        words = [word for word, times in zip(["...", *coded[1:]], counts, strict=True) for _ in range(times)]
        random.Random(seed).shuffle(words)
        return (
            f"Find the most frequent coded words in the following text; the dots are none.\n{' '.join(words)}\n"
            "Question: which three coded words are most frequent?\nAnswer: the three most frequent coded words are"
        )

    return build, coded[1:4]


@cache
def _squad(path: Path) -> tuple[list[str], list[tuple[int, str, tuple[str, ...]]]]:
    """Paragraphs of a file in SQuAD's format, and questions: paragraph, text, answers."""
    paragraphs: list[str] = []
    questions: list[tuple[int, str, tuple[str, ...]]] = []
    try:
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    texts = tuple(dict.fromkeys(answer["text"] for answer in question["answers"]))
                    if texts and not question.get("is_impossible"):
                        questions.append((len(paragraphs), question["question"], texts))
                paragraphs.append(paragraph["context"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("qa", str(path), f"no file in SQuAD's format: {type(error).__name__}: {error}") from error
    if not questions:
        raise ConfigError("qa", str(path), "has no question with an answer")
    return paragraphs, questions


def _qa(which: int) -> Callable[[random.Random, int, Material], Made]:
    def make(rng: random.Random, length: int, material: Material) -> Made:
        path = material.questions[which]
        assert path is not None
        paragraphs, questions = _squad(path)
        right, question, answers = rng.choice(questions)
        others = [p for i, p in enumerate(paragraphs) if i != right and not any(a in p for a in answers)]
        rng.shuffle(others)
        seed, ends = rng.random(), [0]
        for text in others:
            ends.append(ends[-1] + len(text.split()))

        def build(size: int) -> str:
            """So many words of other documents; beyond the file's end they come again."""
            shown, left = [], size
            while left > 0 and others:
                for text in others:
                    words = text.split()[:left]
                    shown.append(" ".join(words))
                    left -= len(words)
                    if left <= 0:
                        break
            texts = [paragraphs[right], *shown]
            order = list(range(len(texts)))
            random.Random(seed).shuffle(order)
            listed = "\n\n".join(f"Document {i}:\n{texts[place]}" for i, place in enumerate(order, 1))
            return (
                "Answer the question by the following documents, with the answer alone.\n\n"
                f"{listed}\n\nQuestion: {question}\nAnswer:"
            )

        return build, list(answers)

    return make


# ---- ruler-mini -------------------------------------------------------------------------------------------------


def mini_key(rng: random.Random) -> str:
    """Two of the letters of keys."""
    return rng.choice(LETTERS) + rng.choice(LETTERS)


def mini_value(rng: random.Random) -> str:
    """Three digits."""
    return "".join(rng.choice(DIGITS) for _ in range(3))


def mini_noise(rng: random.Random, count: int) -> str:
    """So many letters of noise."""
    return "".join(rng.choices(FILLERS, k=count))


def _mini(keys: int, values: int = 1, hops: int = 0) -> Callable[[random.Random, int, Material], Made]:
    """`ab=123` in noise; asked is `?ab=`. A value more: `ab=123456`; a hop: `cd=ab`, asked by the last of the chain."""

    def make(rng: random.Random, length: int, material: Material) -> Made:
        names = _distinct(lambda: mini_key(rng), keys + hops)
        given = _distinct(lambda: mini_value(rng), keys * values)
        parts = [given[i * values : (i + 1) * values] for i in range(keys)]
        needles = [f" {name}={''.join(part)} " for name, part in zip(names, parts, strict=False)]
        needles += [f" {names[keys + i]}={names[keys + i - 1] if i else names[0]} " for i in range(hops)]
        places = [rng.random() for _ in needles]
        places = sorted(places) if hops else places
        asked, others = names[-1] if hops else names[0], random.Random(rng.random())
        noise = ""

        def build(size: int) -> str:
            nonlocal noise
            noise += mini_noise(others, max(0, size - len(noise)))
            pieces, done = [], 0
            for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
                stop = round(place * size)
                pieces += [noise[done:stop], needle]
                done = stop
            return f"{''.join(pieces)}{noise[done:size]} ?{asked}="

        return build, parts[0]

    return make


TASKS: dict[str, Callable[[random.Random, int, Material], Made]] = {
    "niah_single_1": _niah("noise", "number"),
    "niah_single_2": _niah("essay", "number"),
    "niah_single_3": _niah("essay", "uuid"),
    "niah_multikey_1": _niah("essay", "number", keys=4),
    "niah_multikey_2": _niah("needles", "number"),
    "niah_multikey_3": _niah("needles", "uuid", key=_uuid),
    "niah_multivalue": _niah("essay", "number", values=4),
    "niah_multiquery": _niah("essay", "number", keys=4, queries=4),
    "vt": _vt,
    "cwe": _cwe,
    "fwe": _fwe,
    "qa_1": _qa(0),
    "qa_2": _qa(1),
    "mini_single": _mini(1),
    "mini_multikey": _mini(MINI_KEYS),
    "mini_multivalue": _mini(1, values=MINI_VALUES),
    "mini_vt": _mini(1, hops=MINI_HOPS),
}
ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
NEW_TOKENS = {
    **{task: 128 for task in TASKS if task.startswith("niah")},
    **{"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32},
    **{task: 3 * (MINI_VALUES if task == "mini_multivalue" else 1) for task in MINI},
}
