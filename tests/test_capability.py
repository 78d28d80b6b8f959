"""The capability probes, against solvers that read a row's tokens by their names."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from configs.variants import NAMES, apply
from experiments.capability import CHANCE, capability_config
from gattn.config import ConfigError, override
from gattn.data.loader import open_source
from gattn.train import train

TASKS = ("induction", "recall", "arithmetic", "brackets")
KEYS = "abcdefghijklmnop"


def opened(**changes):
    return open_source(
        override(capability_config(), {name.replace("__", "."): value for name, value in changes.items()})
    )


def taken(source, steps, first=0):
    return list(itertools.islice(source.train(first), steps))


def joined(batches):
    batches = list(batches)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def sentences(source, rows):
    """Per row the names of its inputs, BOS first, and {place of an answer in the targets: its name}."""
    for inputs, targets in zip(rows["inputs"], rows["targets"], strict=True):
        places = np.flatnonzero(targets >= 0)
        answers = dict(zip(places.tolist(), source.decode_tokens(targets[places]), strict=True))
        yield source.decode_tokens(inputs), answers


def kind(words):
    """Which task a row is of, from its tokens alone."""
    if "=" in words:
        return "arithmetic"
    if any(word.startswith("(") for word in words):
        return "brackets"
    alternating = all((word in KEYS) == (place % 2 == 1) for place, word in enumerate(words[1:], start=1))
    return "recall" if alternating else "induction"


def continuations(words):
    """What followed the last two tokens wherever they stood before."""
    return {words[i] for i in range(3, len(words)) if words[i - 2 : i] == words[-2:]}


def induction(words):
    (answer,) = continuations(words)
    return answer


def recall(words):
    return dict(zip(words[1:-1:2], words[2::2], strict=True))[words[-1]]  # of equal keys a dict keeps the last value


def arithmetic(words):
    a, b, equals = words[-3:]
    assert equals == "="
    return str((int(a) + int(b)) % 17)


def brackets(words):
    stack = []
    for word in words[1:]:
        if word.startswith("("):
            stack.append(word[1:])
        else:
            assert stack.pop() == word[:-1]
    return f"{stack[-1]})"


SOLVERS = {"induction": induction, "recall": recall, "arithmetic": arithmetic, "brackets": brackets}


@pytest.mark.parametrize("task", TASKS)
def test_held_out_sets_are_of_one_task_and_their_answers_follow_from_what_stands_before(task):
    source = opened(data__batch_size=48)
    batches = list(source.held_out[task]())
    assert [len(batch["inputs"]) for batch in batches] == [48] * 5 + [16]
    assert {(a.dtype.name, a.shape[1]) for batch in batches for a in batch.values()} == {("int32", 64)}
    for words, answers in sentences(source, joined(batches)):
        assert kind(words) == task
        assert words[0] == "BOS"
        assert answers == {place: SOLVERS[task](words[: place + 1]) for place in answers}


def test_training_mixes_the_tasks_in_turn_and_scores_answers_alone():
    source = opened()
    for i, (words, answers) in enumerate(sentences(source, joined(taken(source, 20)))):
        task = TASKS[i % 4]
        assert kind(words) == task
        assert answers == {place: SOLVERS[task](words[: place + 1]) for place in answers}
        assert all(words[place + 1] == answer for place, answer in answers.items() if place < 63)


def test_induction_counts_every_token_that_the_two_before_it_settle():
    for words, answers in sentences(source := opened(), joined(source.held_out["induction"]())):
        row = words[1:]
        period = next(n for n in range(16, 33) if all(row[t] == row[t - n] for t in range(n, 63)))
        settled = [t for t in range(period + 2, 64) if len(continuations(words[: t + 1])) == 1]
        assert sorted(answers) == settled
        assert len(settled) > 12


def test_recall_asks_for_keys_that_were_given_and_counts_every_value_after_a_query():
    again = 0
    for words, answers in sentences(source := opened(), joined(source.held_out["recall"]())):
        assert sorted(answers) == list(range(33, 64, 2))
        assert set(words[33::2]) <= set(words[1:33:2])
        again += len(set(words[1:33:2])) < 16
    assert again > 200  # rows in which a key has a newer value


def test_brackets_count_where_the_type_is_not_that_of_the_last_token():
    for words, answers in sentences(source := opened(), joined(source.held_out["brackets"]())):
        closing = [not word.startswith("(") for word in words[1:]] + [True]  # the last token is in no input
        assert sum(closing) == 32
        assert sorted(answers) == [t for t in range(1, 64) if closing[t] and closing[t - 1]]


def test_no_held_out_problem_is_trained_on_but_its_mirror_image_is():
    source = opened(data__eval_sequences=400)

    def problems(rows):
        for words, answers in sentences(source, rows):
            if kind(words) == "arithmetic":
                assert sorted(answers) == list(range(3, 64, 4))
                row = list(zip(words[1::4], words[2::4], strict=True))
                assert len(set(row)) == 16  # an answer cannot be looked up further up
                yield from row

    held_out = set(problems(joined(source.held_out["arithmetic"]())))
    trained = set(problems(joined(taken(source, 60))))
    numbers = [str(i) for i in range(17)]
    assert held_out | trained == set(itertools.product(numbers, numbers))
    assert not held_out & trained
    assert {(b, a) for a, b in held_out} <= trained
    assert len(held_out) == 68
    # without the row nothing is known of an answer: each is that of as many problems
    assert set(Counter((int(a) + int(b)) % 17 for a, b in held_out).values()) == {4}


@pytest.mark.parametrize("task", TASKS)
def test_chance_is_the_entropy_of_the_answers(task):
    assert set(CHANCE) == set(TASKS)
    targets = joined(opened(data__eval_sequences=3000).held_out[task]())["targets"]
    counts = np.unique(targets[targets >= 0], return_counts=True)[1]
    shares = counts / counts.sum()
    assert math.exp(CHANCE[task]) == pytest.approx(len(counts))
    assert -(shares * np.log(shares)).sum() == pytest.approx(CHANCE[task], abs=2e-3)


def test_batch_does_not_depend_on_the_step_a_run_starts_from_nor_on_the_batch_size():
    whole = taken(opened(), 130)  # two blocks of steps and more
    for start in (1, 63, 64, 129):
        assert equal(taken(opened(), 1, start)[0], whole[start])
    stream = joined(whole)
    odd = joined(taken(opened(data__batch_size=7), 150, first=101))
    assert equal(odd, {name: a[7 * 101 : 7 * 251] for name, a in stream.items()})


@pytest.mark.parametrize("rows", [slice(4, 12), np.array([3, 0, 15]), slice(None, None, 2)])
def test_rows_are_those_of_the_whole_batch(rows):
    whole, part = taken(opened(), 68, first=2), itertools.islice(opened().train(2, rows), 68)
    for one, other in zip(part, whole, strict=True):
        assert equal(one, {name: a[rows] for name, a in other.items()})


def test_seeds_give_other_batches_and_the_same_evaluation():
    zero, one = (opened(train__seed=seed) for seed in (0, 1))
    assert not np.array_equal(taken(zero, 1)[0]["inputs"], taken(one, 1)[0]["inputs"])
    assert zero.fingerprint == one.fingerprint == "e187bca385beddcf"  # a checkpoint resumes on no other
    fewer = opened(data__eval_sequences=100)
    for task in TASKS:
        sets = [joined(source.held_out[task]()) for source in (zero, one, zero, fewer)]
        assert equal(sets[0], sets[1])
        assert equal(sets[0], sets[2])
        assert equal({name: a[:100] for name, a in sets[0].items()}, sets[3])


def test_tokens_have_names_and_a_solver_pays_nothing():
    source = opened()
    names = source.decode_tokens(np.arange(65))
    assert len(set(names)) == source.vocab_size == 65
    assert names[source.bos_id] == "BOS"
    assert source.bayes_loss == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"data.seq_len": 32}, "data.seq_len"), ({"model.vocab_size": 64}, "model.vocab_size")],
)
def test_another_length_or_too_few_tokens_are_refused(changes, field):
    with pytest.raises(ConfigError, match=r"6[45]") as error:
        open_source(override(capability_config(), changes))
    assert error.value.field == field


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_fits_the_model(name):
    base = capability_config()
    assert (apply(base, name) == base) == (name == "baseline")


def test_a_run_reports_each_task_over_its_answers(tmp_path):
    config = override(capability_config(), {
        "model.num_layers": 1,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.head_dim": 8,
        "model.num_experts": 0,
        "model.experts_per_token": 0,
        "model.expert_dim": 0,
        "train.balance_loss": 0.0,
        "train.router_z_loss": 0.0,
        "data.eval_sequences": 16,
        "optim.warmup_steps": 1,
        "train.steps": 2,
        "train.tensorboard": False,
    })  # fmt: skip
    sets = train(config, tmp_path / "run")["eval"]["sets"]
    source = open_source(config)
    answers = {task: int((joined(source.held_out[task]())["targets"] >= 0).sum()) for task in TASKS}
    assert {task: measured["tokens"] for task, measured in sets.items()} == answers
