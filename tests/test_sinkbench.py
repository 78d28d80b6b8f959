"""The sink benches, against a transcription of their description that goes token by token."""

import itertools
import math

import numpy as np
import pytest

from experiments import sinkbench
from gattn.config import ConfigError, override
from gattn.data.loader import open_source

BENCHES = {
    "a": (sinkbench.sinkbench_config, (2, 3), 2, 1.6714),
    "b": (sinkbench.sinkbench_heads_config, (1, 2, 3, 4), 1, 1.6680),
    "deep": (sinkbench.sinkbench_deep_config, (1, 2, 3, 4), 2, 1.7478),
}


@pytest.fixture(params=BENCHES)
def bench(request):
    return BENCHES[request.param]


@pytest.fixture
def literal(request, bench):
    deep = bench is BENCHES["deep"]
    return Literally(bench[1], bench[2], length=48 if deep else 64, share=0.5 if deep else 0.4, permuted=deep)


class Literally:
    """The language in plain Python, one sequence and one position at a time."""

    def __init__(self, offsets, per_offset, length, share, permuted):
        self.length = length
        zipf = np.array([1 / (i + 1) for i in range(64)])
        zipf = zipf / zipf.sum()
        r = np.random.default_rng(123)
        rows = [list(r.dirichlet(zipf * 64 * 0.1 + 1e-4)) for _ in range(64)]
        self.n = n = per_offset * len(offsets)
        self.offset = {i: offsets[i % len(offsets)] for i in range(n)}
        self.rows = []
        for i, row in enumerate(rows):
            others = sum(row[n:])
            if i < n:
                self.rows.append([0.0] * n + [p / others for p in row[n:]])
            else:
                self.rows.append([share / n] * n + [(1 - share) * p / others for p in row[n:]])
        orders = [list(r.permutation(64 - n)) if permuted else list(range(64 - n)) for _ in offsets]
        self.order = {i: orders[i % len(offsets)] for i in range(n)}
        self.first = [0.0] * n + [p / sum(zipf[n:]) for p in zipf[n:]]

    def copy(self, trigger, token):
        """What `token` becomes when `trigger` copies it."""
        return self.n + self.order[trigger][token if token < self.n else token - self.n]

    def sequences(self, rng, batch):
        """One batch: tokens with BOS first, and the mean negative log-likelihood."""
        x = [[64] for _ in range(batch)]
        loss = 0.0
        for t in range(1, self.length + 1):
            for sequence, u in zip(x, rng.random(batch), strict=True):
                before = sequence[t - 1]
                if before in self.offset and t - 1 - self.offset[before] >= 1:
                    sequence.append(self.copy(before, sequence[t - 1 - self.offset[before]]))
                    continue
                row = self.first if t == 1 else self.rows[before]
                total = 0.0
                for token in range(64):
                    total += row[token]
                    if u < total:
                        break
                sequence.append(token)
                loss -= math.log(row[token])
        return np.array(x), loss / (self.length * batch)


def test_stream_is_the_description_read_literally(bench, literal):
    source = open_source(override(bench[0](), {"data.batch_size": 5, "train.seed": 2}))
    rng = np.random.default_rng(2 + 1)
    for batch in itertools.islice(source.train(0), 12):
        x, _ = literal.sequences(rng, 5)
        np.testing.assert_array_equal(batch["inputs"], x[:, :-1])
        np.testing.assert_array_equal(batch["targets"], x[:, 1:])
        assert {(a.dtype.name, a.shape) for a in batch.values()} == {("int32", (5, literal.length))}


def test_held_out_is_the_description_read_literally_and_its_bayes_loss(bench, literal):
    config, published = bench[0](), bench[3]
    source, size = open_source(config), config.data.batch_size
    x, loss = literal.sequences(np.random.default_rng(10**6), config.data.eval_sequences)
    batches = list(source.held_out["held-out"]())
    np.testing.assert_array_equal(np.concatenate([b["inputs"] for b in batches]), x[:, :-1])
    np.testing.assert_array_equal(np.concatenate([b["targets"] for b in batches]), x[:, 1:])
    assert source.bayes_loss == pytest.approx(loss, abs=1e-9)
    assert round(source.bayes_loss, 4) == published
    assert [len(b["inputs"]) for b in batches] == [size] * 8


def test_triggers_copy_wherever_they_stand_and_never_chain(bench, literal):
    config, offsets, triggers = bench[0](), bench[1], literal.n
    copies = 0
    batches = list(itertools.islice(open_source(config).train(100), 1920 // config.data.batch_size))
    x = np.concatenate([np.c_[batch["inputs"], batch["targets"][:, -1]] for batch in batches])
    assert ((x[:, 1:] < 64) & (x[:, 1:] >= 0)).all()
    assert (x[:, 0] == 64).all()
    assert (x[:, 1] >= triggers).all()
    assert abs((x[:, 1:] < triggers).mean() - (0.333 if triggers == 8 else 0.285)) < 0.005
    for position in range(1, literal.length):
        for trigger in range(triggers):
            rows = x[x[:, position] == trigger]
            assert (rows[:, position + 1] >= triggers).all()
            source = position - offsets[trigger % len(offsets)]
            if source >= 1:
                wanted = [literal.copy(trigger, token) for token in rows[:, source]]
                np.testing.assert_array_equal(rows[:, position + 1], wanted)
                copies += len(rows)
    assert copies > 0.2 * x.size


def test_batch_does_not_depend_on_the_step_a_run_starts_from(bench):
    config = bench[0]()
    whole = list(itertools.islice(open_source(config).train(0), 70))  # two blocks of steps and more
    for start in (1, 31, 32, 69):
        batch = next(open_source(config).train(start))
        np.testing.assert_array_equal(batch["inputs"], whole[start]["inputs"])
        np.testing.assert_array_equal(batch["targets"], whole[start]["targets"])


def test_seeds_give_other_batches_and_the_same_evaluation(bench):
    zero, one = (open_source(override(bench[0](), {"train.seed": seed})) for seed in (0, 1))
    assert not np.array_equal(next(zero.train(0))["inputs"], next(one.train(0))["inputs"])
    assert zero.bayes_loss == one.bayes_loss
    assert zero.fingerprint == one.fingerprint


def test_benches_differ_in_what_the_description_says():
    a, b = sinkbench.sinkbench_config(), sinkbench.sinkbench_heads_config()
    assert override(b, {
        "model.num_heads": 2,
        "model.num_kv_heads": 2,
        "model.head_dim": 64,
        "model.position": "rope",
        "optim.weight_decay": 0.1,
        "data.source": a.data.source,
    }) == a  # fmt: skip
    deep = sinkbench.sinkbench_deep_config()
    assert (deep.model.num_layers, deep.optim.weight_decay, deep.data.seq_len, deep.train.steps) == (6, 0.0, 48, 1500)
    # a checkpoint resumes on the same fingerprint only: it must not move while the language stays
    assert [open_source(c).fingerprint for c in (a, b, deep)] == [
        "fc378065e9354445",
        "84e61454b44cf86e",
        "66cbc6b7b37a7765",
    ]
    assert (b.model.num_heads, b.model.head_dim, b.model.position, b.optim.weight_decay) == (4, 32, "learned", 1.0)
    assert (a.model.vocab_size, a.data.seq_len, a.data.batch_size, a.train.steps) == (65, 64, 32, 1200)


def test_tokens_have_names(bench):
    source = open_source(bench[0]())
    names = source.decode_tokens(np.arange(65))
    assert len(set(names)) == 65
    assert names[64] == "BOS"


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"data.seq_len": 32}, "data.seq_len"), ({"model.vocab_size": 64}, "model.vocab_size")],
)
def test_another_length_or_too_few_tokens_are_refused(bench, changes, field):
    with pytest.raises(ConfigError, match=r"48|6[45]") as error:
        open_source(override(bench[0](), changes))
    assert error.value.field == field


def test_a_longer_text_goes_on_where_the_bench_ends(bench):
    """Evaluation's sequences, of another language's fingerprint; its Bayes loss read literally."""
    config = override(bench[0](), {"data.eval_sequences": 8})
    short = open_source(config)
    length = 3 * config.data.seq_len
    long = open_source(override(config, {"data.seq_len": length, "model.max_seq_len": length}))
    for one, other in zip(short.held_out["held-out"](), long.held_out["held-out"](), strict=True):
        assert other["inputs"].shape[1] == length
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(other[name][:, : config.data.seq_len], one[name])
    assert short.fingerprint != long.fingerprint
    deep = bench is BENCHES["deep"]
    literal = Literally(bench[1], bench[2], length=length, share=0.5 if deep else 0.4, permuted=deep)
    assert long.bayes_loss == pytest.approx(literal.sequences(np.random.default_rng(10**6), 8)[1], abs=1e-9)


def test_unseen_leaves_out_the_first_target_and_nothing_else():
    """The same sequences, no loss at BOS, and the Bayes loss of what is left."""
    config = sinkbench.sinkbench_deep_config()
    unseen = override(config, {"data.source": "experiments.sinkbench:sinkbench_deep_unseen"})
    whole, part = open_source(config), open_source(unseen)
    batches = [(next(s.train(3)), next(s.held_out["held-out"]())) for s in (whole, part)]
    for one, other in zip(*batches, strict=True):
        np.testing.assert_array_equal(one["inputs"], other["inputs"])
        np.testing.assert_array_equal(one["targets"][:, 1:], other["targets"][:, 1:])
        assert (other["targets"][:, 0] == -1).all()
        assert (one["targets"][:, 0] >= 0).all()
    language = sinkbench.DEEP
    first = np.concatenate([b["targets"][:, 0] for b in whole.held_out["held-out"]()])
    lost = -np.log(language.first[first]).mean()
    assert 48 * whole.bayes_loss == pytest.approx(47 * part.bayes_loss + lost)
    assert whole.fingerprint != part.fingerprint
