"""RULER's generators by their definitions: lengths, needles, depths, answers in the text; and its scores."""

import collections
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gattn import ruler
from gattn.config import ConfigError
from gattn.ruler import Material, samples, score

ESSAY = " ".join(f"essay{i % 977} and thought{i % 31}." for i in range(60_000))


def words(text):
    """A tokenizer of sorts: a token for up to four characters of a word, or of what stands between words."""
    return sum(-(-len(part) // 4) for part in re.findall(r"\w+|[^\w\s]+", text))


TOKENIZERS = {"words": words, "bytes": lambda text: len(text.encode())}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Questions whose answers stand in one paragraph each."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Fact {i}: the keeper of room {i} is Mr. Keeper{i}x. " + f"Room {i} is large. " * 12,
                    "qas": [{"question": f"Who keeps room {i}?", "answers": [{"text": f"Keeper{i}x"}] * 2}],
                }
            ]
        }
        for i in range(40)
    ]
    path = tmp_path_factory.mktemp("qa") / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return Material(ESSAY, (path, path))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("task", ruler.TASKS)
def test_lengths_and_answers(task, tokenizer, material):
    """Within 1% of the target, never beyond; all answers in the prompt, and nothing but the text of the task."""
    count = TOKENIZERS[tokenizer]
    lengths = (256, 1000, 4096) if task in ruler.MINI else (4096, 16_384) if tokenizer == "words" else (16_384,)
    for length in lengths:
        for sample in samples(task, length, 3, count, material):
            used = count(sample.prompt) + sample.new_tokens
            assert 0.99 * length <= used <= length, (used, length)
            assert all(answer.lower() in sample.prompt.lower() for answer in sample.answers)
            assert len(set(sample.answers)) == len(sample.answers)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_an_oracle_scores_100_and_a_random_answerer_about_0(task, material):
    rng = random.Random(0)
    made = samples(task, 4096, 30, words, material)
    assert all(score(sample, ", ".join(sample.answers).upper()) == 1 for sample in made)
    guesses = [" ".join(str(rng.randint(10**6, 10**7 - 1)) for _ in sample.answers) for sample in made]
    mean = sum(map(score, made, guesses)) / len(made)
    assert mean <= (0.05 if task in ruler.MINI else 0)


@pytest.mark.parametrize("task", ruler.MINI)
def test_chance_is_what_one_scores_who_draws(task):
    made, rng = samples(task, 512, 600, len, Material()), random.Random(0)

    def draw(sample):
        if task == "mini_multikey":
            return rng.choice(re.findall(r"=(\d{3})", sample.prompt))
        return "".join(rng.choice(ruler.DIGITS) for _ in range(sample.new_tokens))

    mean = 100 * sum(score(sample, draw(sample)) for sample in made) / len(made)
    assert mean == pytest.approx(ruler.CHANCE[task], abs=4 if task == "mini_multikey" else 0.6)


NEEDLE = re.compile(r"The secret (\w+) of ([\w-]+) is ([\w-]+)\.")
COUNTS = {
    **{f"niah_single_{i}": (1, 1, 1) for i in (1, 2, 3)},
    **{"niah_multikey_1": (4, 1, 1), "niah_multivalue": (1, 4, 1), "niah_multiquery": (4, 1, 4)},
}


@pytest.mark.parametrize("task", [task for task in ruler.OFFICIAL if task.startswith("niah")])
def test_needles(task, material):
    for sample in samples(task, 4096, 8, words, material):
        text, _, question = sample.prompt.partition("\nQuestion:")
        found = NEEDLE.findall(text)
        asked = [name for _, name, value in found if value in sample.answers]
        assert all(name in question for name in asked)
        given = {}
        for _, name, value in found:
            given.setdefault(name, []).append(value)
        assert sorted(v for name in set(asked) for v in given[name]) == sorted(sample.answers)
        uuids = task in ("niah_single_3", "niah_multikey_3")
        assert all(re.fullmatch(r"[0-9a-f-]{36}" if uuids else r"\d{7}", answer) for answer in sample.answers)
        if task in COUNTS:
            keys, values, queries = COUNTS[task]
            assert len(given) == keys
            assert {len(v) for v in given.values()} == {values}
            assert len(set(asked)) == queries
        else:
            assert len(found) > 50
            assert len(NEEDLE.sub("", text).split()) < 25  # nothing else but the introduction


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "mini_single"])
def test_needles_are_spread_over_all_depths(task, material):
    depths = []
    for sample in samples(task, 2048, 120, words, material):
        start = sample.prompt.index(sample.answers[0])
        depths.append(start / len(sample.prompt))
    parts = collections.Counter(min(int(depth * 5), 4) for depth in depths)
    assert set(parts) == set(range(5))
    assert max(parts.values()) < 50


@pytest.mark.parametrize("hops", ["vt", "mini_vt"])
def test_a_chain_leads_from_the_value_to_every_variable(hops):
    for sample in samples(hops, 4096, 5, words, Material()):
        if hops == "vt":
            text = sample.prompt.partition("\n\n")[2].partition("\n\n")[2]
            known = {re.search(r"have the value (\d+)", text)[1]}
            for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
                assert source in known
                known.add(name)
            assert known - {source for source in known if source.isdigit()} == set(sample.answers)
            assert len(sample.answers) == 5
        else:
            lines = dict(re.findall(r" (\w+)=(\w+) ", sample.prompt))
            value = re.search(r"\?(\w+)=$", sample.prompt)[1]
            for _ in range(ruler.MINI_HOPS + 1):
                value = lines[value]
            assert (value,) == sample.answers
            assert len(lines) == ruler.MINI_HOPS + 1


@pytest.mark.parametrize(("length", "often", "seldom"), [(8192, 30, 3), (2048, 6, 1)])
def test_common_words_are_those_of_the_answer(length, often, seldom):
    for sample in samples("cwe", length, 4, words, Material()):
        found = collections.Counter(re.findall(r"\d+\. ([\w-]+)", sample.prompt.rpartition("\n\n")[2]))
        assert {word for word, _ in found.most_common(10)} == set(sample.answers)
        assert {found.pop(answer) for answer in sample.answers} == {often}
        assert set(found.values()) <= set(range(1, seldom + 1))
        assert len(found) > 20


def test_coded_words_follow_zeta_and_the_first_is_hidden():
    for sample in samples("fwe", 16_384, 4, words, Material()):
        found = collections.Counter(sample.prompt.split("\n")[1].split())
        ranked = found.most_common(5)
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == list(sample.answers)
        assert ranked[1][1] / ranked[3][1] == pytest.approx(4, rel=0.1)
        assert all(re.fullmatch("[a-z]{6}", word) for word in found if word != "...")


def test_questions_have_their_paragraph_among_the_documents(material):
    places = set()
    for sample in samples("qa_1", 4096, 12, words, material):
        documents = re.split(r"Document \d+:\n", sample.prompt)[1:]
        right = [i for i, text in enumerate(documents) if sample.answers[0] in text]
        assert len(right) == 1
        assert len(documents) > 5
        places.add(right[0] * 3 // len(documents))
    assert len(places) == 3


def test_scores_are_rulers():
    make = lambda task, *answers: ruler.Sample(task, "", answers, 1)  # noqa: E731
    assert score(make("niah_multivalue", "1234567", "7654321"), "It is 1234567.") == 0.5
    assert score(make("qa_1", "Paris", "paris, France"), "PARIS") == 1
    assert score(make("vt", "ABCDE"), "abcde") == 1
    assert score(make("qa_2", "Paris"), "Rome") == 0


@settings(max_examples=10)
@given(st.sampled_from(sorted(set(ruler.TASKS) - {"qa_1", "qa_2"})), st.integers(0, 5))
def test_samples_are_fixed_by_their_seed(task, seed):
    first, again, other = (samples(task, 2048, 2, words, Material(ESSAY), s) for s in (seed, seed, seed + 1))
    assert first == again
    assert first[0].prompt != other[0].prompt != first[1].prompt


def test_what_cannot_be_asked_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="niah_singl"):
        samples("niah_singl", 4096, 1, words, Material())
    with pytest.raises(ConfigError, match="essay"):
        samples("niah_single_2", 4096, 1, words, Material())
    with pytest.raises(ConfigError, match="leave the task out"):
        samples("qa_1", 4096, 1, words, Material())
    with pytest.raises(ConfigError, match="too short"):
        samples("vt", 128, 1, words, Material())
    path = tmp_path / "x.json"
    path.write_text('{"data": [{"title": 1}]}')
    with pytest.raises(ConfigError, match="SQuAD"):
        samples("qa_2", 4096, 1, words, Material("", (None, path)))
