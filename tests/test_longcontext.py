"""The language of the long-context table, read by rules that know nothing of its generator."""

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest

from experiments.longcontext import BOS, CHARACTERS, TAUGHT, longcontext_config
from gattn import ruler
from gattn.config import ConfigError, override
from gattn.data.loader import open_source
from gattn.ruler import Material


def opened(**changes):
    return open_source(
        override(longcontext_config(), {name.replace("__", "."): value for name, value in changes.items()})
    )


def texts(source, batches):
    for batch in batches:
        assert (batch["inputs"][:, 0] == BOS).all()
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        yield from map(source.decode, batch["targets"])


def answers(text):
    """Place -> digit that every question of a text is answered with, by the needles before it."""
    found = {}
    for question in re.finditer(r" \?([a-l]{2})=", text):
        (value,) = re.findall(rf"(?<!\?){question[1]}=(\d{{3}}) ", text[: question.start() + 1])
        found |= {question.end() + i: digit for i, digit in enumerate(value) if question.end() + i < len(text)}
    return found


@pytest.mark.parametrize("length", [64, 256])
def test_training_rows_are_of_three_kinds_and_their_questions_have_answers(length):
    source = opened(data__seq_len=length)
    kinds = Counter()
    for text in texts(source, itertools.islice(source.train(0), 40)):
        assert len(text) == length
        periods = [n for n in range(4, length // 4 + 1) if text[n:] == text[:-n]]
        if periods:
            kinds["copied"] += 1
            continue
        kinds["filled" if re.search("[m-z]", text) else "needles"] += 1
        assert re.fullmatch(
            r"([m-z]*( [a-l]{2}=\d{3} | \?[a-l]{2}=\d{3}))*[m-z]*( (\??([a-l]{1,2}(=\d{0,3})?)?)?)?", text
        )
        keys = re.findall(r"(?<!\?)([a-l]{2})=\d{3} ", text)
        assert len(keys) == len(set(keys)) <= 16
        for place, digit in answers(text).items():
            assert text[place] == digit
    assert all(count > 640 / 5 for count in kinds.values())
    assert len(kinds) == 3


def test_held_out_targets_are_the_answers_and_those_alone():
    source = opened(data__seq_len=128, data__eval_sequences=20)
    assert source.bayes_loss == 0
    for kind, batches in source.held_out.items():
        rows = 0
        for batch in batches():
            for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
                text = source.decode(inputs)  # up to the last target
                places = np.flatnonzero(targets >= 0)
                wanted = {place: digit for place, digit in answers(text + "?").items() if place < 128}
                assert {p: CHARACTERS[targets[p]] for p in places} == wanted
                assert bool(re.search("[m-z]", text)) == (kind == "filled")
                rows += 1
        assert rows == 20


def test_a_row_depends_on_its_seed_step_and_place_alone():
    """Whatever part of a batch is taken, from whatever step; and other seeds and held-out rows are others."""
    source = opened(train__seed=3)
    every = list(itertools.islice(source.train(0), 6))
    later = next(source.train(5, slice(4, None, 4)))
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(later[name], every[5][name][4::4])
    some = {source.decode(row) for batch in every for row in batch["targets"]}
    assert len(some) == 6 * 16
    other = {source.decode(row) for row in next(opened(train__seed=4).train(0))["targets"]}
    assert not some & other
    held = {source.decode(row) for batches in source.held_out.values() for one in batches() for row in one["inputs"]}
    assert not {text[:-1] for text in some} & held


def test_ruler_mini_can_be_asked_and_has_the_form_that_is_trained_on():
    source = opened()
    for task in TAUGHT:
        for sample in ruler.samples(task, 127, 20, len, Material()):
            assert source.decode(source.encode(sample.prompt)) == sample.prompt
            whole = sample.prompt + sample.answers[0]
            assert re.fullmatch(r"([m-z]*( [a-l]{2}=\d{3} ))*[m-z]* \?[a-l]{2}=\d{3}", whole)
            places = answers(whole)
            assert "".join(places[i] for i in sorted(places)) == sample.answers[0]


def test_what_it_has_no_room_or_characters_for_is_refused():
    with pytest.raises(ConfigError, match="at least 16") as error:
        opened(data__seq_len=15)
    assert error.value.field == "data.seq_len"
    with pytest.raises(ConfigError, match="'AÉ'"):
        opened().encode("A noÉ")
    random_text = "".join(random.Random(0).choices(CHARACTERS, k=50))
    assert opened().decode([BOS, *opened().encode(random_text)]) == random_text
