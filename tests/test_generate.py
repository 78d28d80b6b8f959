"""Decoding: what the cache gives is what the whole text gives, in any batch; sampling obeys its rules."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from configs.variants import VARIANTS
from gattn import generate, model, sharding
from gattn.config import Config, ConfigError, DataConfig, ModelConfig
from gattn.generate import Generator, Sampling
from tests.eight import found_by

MODEL = ModelConfig(
    vocab_size=300,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    max_seq_len=128,
    match_params=False,
)
POSITIONS = {
    "rope": {},
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8},
    "learned": {"position": "learned"},
    "alibi": {"position": "alibi"},
    "none": {"position": "none"},
}
RANGES = {"full": {}, "window": {"window": 5}, "kept": {"window": 5, "kept_first": 2}}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 16}
END = 0


def weights(config, scale=0.3, seed=0):
    """Large enough that attention is far from uniform; norms near one."""
    rng, shapes = np.random.default_rng(seed), model.abstract(config)[1]

    def draw(path, leaf):
        mean = 1.0 if "gain" in path else 0.0
        return leaf.replace(jnp.asarray(mean + scale * rng.standard_normal(leaf.shape), jnp.float32))

    return nnx.from_flat_state([(path, draw(path, leaf)) for path, leaf in nnx.to_flat_state(shapes)])


def whole(config, params, tokens):
    """Logits without a cache."""
    decoder = nnx.merge(model.abstract(config)[0], params)
    return decoder.logits(decoder(jnp.asarray(tokens))[0])


def cached(config, params, tokens, cuts):
    """The same, read piece by piece."""
    graph, apart = model.unstack(config, params)
    decoder, memory = nnx.merge(graph, apart), model.new_memory(config, len(tokens), 32)
    found = []
    for start, stop in itertools.pairwise(cuts):
        begin = jnp.full(len(tokens), start, jnp.int32)
        hidden, memory = decoder.extend(jnp.asarray(tokens[:, start:stop]), memory, begin)
        found.append(decoder.logits(hidden))
    return jnp.concatenate(found, axis=1)


def check(config):
    params = weights(config)
    tokens = np.random.default_rng(1).integers(0, 300, (2, 17))
    expected = jax.jit(lambda p, t: whole(config, p, t))(params, tokens)
    ours = jax.jit(lambda p: cached(config, p, tokens, [0, 9, 10, 17]))(params)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(ours, expected, atol=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("reach", RANGES)
@pytest.mark.parametrize("position", POSITIONS)
def test_cache_gives_the_logits_of_the_whole_text(position, reach):
    gate = VARIANTS["g1_elementwise"]["gates"]
    check(dataclasses.replace(MODEL, gates=gate, **POSITIONS[position], **RANGES[reach]))


@pytest.mark.parametrize("name", VARIANTS)
def test_cache_gives_the_logits_of_the_whole_text_with_every_variant(name):
    changes = dict(VARIANTS[name])
    if any(key.startswith("experts") for key in changes) or name.startswith("experts"):
        changes |= {"num_experts": 8, "experts_per_token": 4, "expert_dim": 16}
    check(dataclasses.replace(MODEL, **changes))


def test_cache_with_experts_and_sinks():
    check(dataclasses.replace(MODEL, softmax="sink_logit", **EXPERTS, **RANGES["kept"]))


@pytest.mark.parametrize("position", POSITIONS)
def test_a_cache_of_kept_tokens_and_a_window_is_the_short_text(position):
    """What StreamingLLM means: the last logits are those of the text without what has left the cache (one layer: in
    deeper ones what was kept still knows of it), read at the places in the cache."""
    if position == "learned":
        return  # its embeddings carry the places of the whole text
    config = dataclasses.replace(MODEL, num_layers=1, window=5, kept_first=2, **POSITIONS[position])
    params, tokens = weights(config), np.random.default_rng(1).integers(0, 300, (2, 17))
    plain = dataclasses.replace(config, window=0, kept_first=0)
    short = np.concatenate([tokens[:, :2], tokens[:, -5:]], axis=1)
    last = whole(config, params, tokens)[:, -1]
    np.testing.assert_allclose(last, whole(plain, params, short)[:, -1], atol=1e-4)
    assert np.abs(last - whole(plain, params, tokens)[:, -1]).max() > 1e-2


def test_kept_tokens_and_segments_see_nothing_of_other_documents():
    config = dataclasses.replace(MODEL, window=5, kept_first=2)
    params, rng = weights(config), np.random.default_rng(1)
    tokens, ids = rng.integers(0, 300, (1, 17)), np.repeat([[1, 2]], [6, 11], axis=1)
    run = lambda tokens: nnx.merge(model.abstract(config)[0], params)(tokens, ids)[0]  # noqa: E731
    changed = np.concatenate([rng.integers(0, 300, (1, 6)), tokens[:, 6:]], axis=1)
    np.testing.assert_allclose(run(tokens)[:, 6:], run(changed)[:, 6:], atol=1e-6)
    assert np.isfinite(run(tokens)).all()


def prompts(*lengths):
    rng = np.random.default_rng(2)
    return [rng.integers(1, 300, length).astype(np.int32) for length in lengths]


def generator(**changes):
    config = Config(model=dataclasses.replace(MODEL, **changes), data=DataConfig(seq_len=64))
    return Generator(config, weights(config.model), END)


def continuations(made, given, sampling):
    return np.stack(list(made.tokens(given, sampling)), axis=1)


@pytest.mark.parametrize("reach", RANGES)
def test_a_ragged_batch_gives_what_single_prompts_give(reach):
    made, sampling = generator(**RANGES[reach]), Sampling(max_new_tokens=12)
    given = prompts(3, 70, 1, 17)
    together = continuations(made, given, sampling)
    for row, prompt in enumerate(given):
        alone = continuations(made, [prompt], sampling)[0]
        np.testing.assert_array_equal(together[row, : len(alone)], alone)
    assert len({tuple(row) for row in together.tolist()}) == 4


def test_greedy_is_the_argmax_of_the_whole_text():
    made = generator()
    (prompt,) = prompts(5)
    found = continuations(made, [prompt], Sampling(max_new_tokens=8))[0]
    text = np.concatenate([prompt, found])
    logits = whole(made.config.model, weights(made.config.model), text[None])[0]
    np.testing.assert_array_equal(np.argmax(logits, axis=-1)[4:-1], found)


def test_one_compilation_for_all_steps_lengths_and_samplings():
    made = generator()
    for length, seed in ((3, 0), (30, 1)):
        for temperature, top_k in ((0.7, 5), (1.3, 0)):
            sampling = Sampling(max_new_tokens=6, temperature=temperature, top_k=top_k, seed=seed)
            continuations(made, prompts(length), sampling)
    assert made._decode._cache_size() == 1
    assert made._prefill._cache_size() == 1


def test_a_seed_repeats_a_sample_and_another_does_not():
    made, given = generator(), prompts(4, 9)
    samples = [continuations(made, given, Sampling(16, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(samples[0], samples[1])
    assert (samples[0] != samples[2]).mean() > 0.5
    same = continuations(made, [given[0], given[0]], Sampling(16, temperature=1.0))
    assert (same[0] != same[1]).any()  # each row draws by itself


def test_samples_have_the_model_s_probabilities():
    made, (prompt,) = generator(), prompts(6)
    logits = whole(made.config.model, weights(made.config.model), prompt[None])[0, -1]
    expected = np.asarray(jax.nn.softmax(generate.kept(logits / 1.5, 4, 1.0)))
    drawn = [next(made.tokens([prompt] * 64, Sampling(1, temperature=1.5, top_k=4, seed=seed))) for seed in range(25)]
    shares = np.bincount(np.concatenate(drawn), minlength=300) / 1600
    assert (expected > 0).sum() == 4
    np.testing.assert_allclose(shares, expected, atol=4 * (0.25 / 1600) ** 0.5)


@given(st.integers(0, 9), st.floats(0.01, 1.0), st.integers(0, 100))
def test_top_k_and_top_p_keep_the_smallest_sets(k, p, seed):
    logits = np.random.default_rng(seed).permutation(8).astype(np.float32)
    found = np.asarray(generate.kept(logits, k, np.float32(p))) > -np.inf
    order = np.argsort(-logits)[: k or 8]
    probabilities = np.exp(logits[order].astype(np.float64))
    before = np.cumsum(probabilities / probabilities.sum()) - probabilities / probabilities.sum()
    if np.abs(before - p).min() > 1e-5:  # else float32 decides
        assert set(np.flatnonzero(found)) == set(order[before < p])


def test_the_end_ends_a_row_and_the_last_row_ends_all():
    made, given = generator(), prompts(5, 8)
    free = continuations(made, given, Sampling(max_new_tokens=10))
    made.end = int(free[0, 3])
    first = [int(np.flatnonzero(row == made.end)[0]) if made.end in row else 10 for row in free]
    found = continuations(made, given, Sampling(max_new_tokens=10))
    assert found.shape[1] == min(max(first) + 1, 10)
    for row, stop in enumerate(first):
        np.testing.assert_array_equal(found[row, :stop], free[row, :stop])
        assert (found[row, stop:] == made.end).all()


def decode(ids):
    return bytes(i % 256 for i in ids).decode("utf-8", errors="replace")


def test_text_shows_whole_characters_and_nothing_of_a_stop():
    one = generate.Text(decode, ["END", "\n\n"])
    shown = [one.add(i) for i in "aé\nbENx\nEND tail".encode() if not one.ended]
    assert "".join(shown) == one.text == "aé\nbENx\n"
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in shown)
    two = generate.Text(decode, ["END"])
    assert "".join([two.add(i) for i in b"the EN"]) == "the "
    assert (two.rest(), two.text) == ("EN", "the EN")


@given(st.text(alphabet="ab", max_size=12), st.text(alphabet="ab", min_size=1, max_size=3))
def test_text_stops_where_the_string_first_stands(text, stop):
    one, shown = generate.Text(decode, [stop]), ""
    for byte in text.encode():
        if not one.ended:
            shown += one.add(byte)
            assert text.partition(stop)[0].startswith(shown)
    assert shown + one.rest() == one.text == text.partition(stop)[0]


def test_texts_are_the_decoded_tokens_piece_by_piece():
    made, given, sampling = generator(), prompts(5, 8), Sampling(max_new_tokens=12)
    shown = ["", ""]

    def show(row, part):
        shown[row] += part

    found = generate.texts(made, given, sampling, decode, show)
    assert found == shown == [decode(row) for row in continuations(made, given, sampling).tolist()]
    stop = found[1][3:5]
    cut = generate.texts(made, given, dataclasses.replace(sampling, stop=(stop,)), decode)
    assert cut == [text.partition(stop)[0] for text in found]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_bad_sampling_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**changes)


def test_prompts_that_cannot_be_continued_are_refused():
    with pytest.raises(ConfigError, match="prompt"):
        next(generator().tokens([np.zeros(0, np.int32)], Sampling()))
    with pytest.raises(ConfigError, match="128 learned positions"):
        next(generator(position="learned").tokens(prompts(10), Sampling(max_new_tokens=128)))


@pytest.fixture(scope="module")
def on_eight():
    return found_by("tests.eight_generate")


PIECES = {"data": 1, "mixed": 4, "expert": 4}


@pytest.mark.parametrize("mesh", PIECES)
def test_a_mesh_writes_what_one_device_writes(on_eight, mesh):
    """And its weights stay cut up."""
    assert on_eight[mesh] == {"equal": True, "pieces": PIECES[mesh]}, on_eight[mesh]


def test_a_mesh_that_cuts_sequences_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 1, 2, 1), sharding.AXES)
    with pytest.raises(ConfigError, match="context"):
        Generator(Config(), None, END, mesh)


def test_the_caller_does_not_compute_on_the_generator_s_mesh():
    steps = generator().tokens(prompts(3), Sampling(max_new_tokens=3))
    next(steps)
    assert jax.sharding.get_abstract_mesh().empty
