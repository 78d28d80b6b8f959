"""Configs: round trips, overrides, refusals, fingerprints, and the FFN that pays for a gate."""

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.models import PRESETS, tiny
from configs.variants import NAMES, apply
from gattn.config import Config, ConfigError, GateSpec, ModelConfig, differences, from_dict, override, to_json


def literals(cls, name):
    return st.sampled_from(typing.get_args(typing.get_type_hints(cls)[name]))


@st.composite
def gate_specs(draw):
    names = ("position", "granularity", "sharing", "op", "activation", "source")
    values = {name: draw(literals(GateSpec, name)) for name in names}
    values["bias"] = values["source"] == "input" and draw(st.booleans())
    values["bias_init"] = draw(st.sampled_from([0.0, -1.5])) if values["bias"] else 0.0
    values["init_scale"] = draw(st.sampled_from([0.0, 0.5, 1.0])) if values["source"] == "input" else 1.0
    if values["position"] == "g5":
        values |= {"granularity": "elementwise", "sharing": "specific"}
    return GateSpec(**values)


@st.composite
def configs(draw):
    gates = draw(st.lists(gate_specs(), max_size=3, unique_by=lambda gate: gate.position))
    return override(
        Config(),
        {
            "model.gates": tuple(gates),
            "model.softmax": draw(literals(ModelConfig, "softmax")),
            "model.num_layers": draw(st.integers(1, 5)),
            "model.ffn_dim": draw(st.integers(40, 80)) * 8,
            "train.seed": draw(st.integers(0, 3)),
            "train.accumulation": draw(st.sampled_from([1, 2, 16])),
            "train.z_loss": draw(st.sampled_from([0, 1e-4])),
            "train.ema_decay": draw(st.floats(0, 1, exclude_max=True)),
            "train.keep_best": draw(st.booleans()),
            "train.wandb": draw(st.sampled_from(["", "gates"])),
            "data.source": draw(st.sampled_from(["corpus", "a:b", "a/=1", "a=3,gs://b/c=4,d=5"])),
            **draw(st.sampled_from([{"optim.schedule": "linear"}, {"optim.schedule": "wsd", "optim.decay_steps": 9}])),
        },
    )


@given(configs())
@settings(max_examples=50, deadline=None)
def test_json_round_trip(config):
    again = from_dict(Config, json.loads(to_json(config)))
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", NAMES)
def test_json_round_trip_of_every_preset_and_variant(preset, variant):
    try:
        config = apply(PRESETS[preset](), variant)
    except ConfigError:
        assert variant == "experts_plus4"  # a dense model has no experts to add to
        return
    assert from_dict(Config, json.loads(to_json(config))) == config


@given(gate_specs(), gate_specs())
@settings(max_examples=200, deadline=None)
def test_labels_tell_specs_apart(one, other):
    assert (one.label == other.label) == (one == other)


def test_fingerprint_ignores_cosmetic_fields_only():
    config = Config()
    same = override(config, {"train.log_every": 3, "train.eval_every": 7, "train.checkpoint_every": 9})
    assert same.fingerprint() == config.fingerprint()
    changes = {
        "train.seed": 1,
        "train.steps": 999,
        "model.norm_eps": 1e-5,
        "data.batch_size": 7,
        "optim.b2": 0.9,
        "model.gates": (GateSpec(),),
    }
    prints = {override(config, {key: value}).fingerprint() for key, value in changes.items()}
    assert len(prints | {config.fingerprint()}) == len(changes) + 1


def test_a_whole_number_is_the_same_number():
    """1 and 1.0 are one weight decay, one fingerprint and one run."""
    assert (
        override(Config(), {"optim.weight_decay": 1}).run_name
        == override(Config(), {"optim.weight_decay": 1.0}).run_name
    )


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.num_layers = 3


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"model.num_layer": 2}, "model.num_layer", "model.num_layers"),
        ({"modle.num_layers": 2}, "modle.num_layers", "model.num_layers"),
        ({"model": 3}, "model", "expected an object"),
        ({"model.num_layers": 0}, "model.num_layers", "at least 1"),
        ({"model.num_layers": 2.5}, "model.num_layers", "whole number"),
        ({"model.num_layers": True}, "model.num_layers", "whole number"),
        ({"model.dtype": "float16"}, "model.dtype", "bfloat16"),
        ({"model.num_kv_heads": 3}, "model.num_kv_heads", "num_heads = 4"),
        ({"model.head_dim": 31}, "model.head_dim", "even"),
        ({"model.rope_theta": 0.0}, "model.rope_theta", "above 0"),
        ({"model.norm_eps": float("nan")}, "model.norm_eps", "finite"),
        ({"model.gates": ("g1",)}, "model.gates.0", "object"),
        ({"model.gates": ({"position": "g6"},)}, "model.gates.0.position", "'g1'"),
        ({"model.gates": (GateSpec(), GateSpec("g1", "headwise"))}, "model.gates", "gated twice"),
        ({"model.gates": (GateSpec(),), "model.ffn_dim": 40}, "model.ffn_dim", "match_params"),
        ({"model.position": "learned", "model.max_seq_len": 8}, "model.max_seq_len", "256"),
        ({"model.vocab_size": 256}, "model.vocab_size", "257"),
        ({"optim.warmup_steps": 1000}, "optim.warmup_steps", "train.steps"),
        ({"optim.learning_rate": 1e-5}, "optim.final_learning_rate", "learning_rate"),
        ({"optim.b1": 1.0}, "optim.b1", "[0, 1)"),
        ({"optim.eps": 10**400}, "optim.eps", "finite"),
        ({"train.seed": 2**32}, "train.seed", "below"),
        ({"data.seq_len": 1}, "data.seq_len", "at least 2"),
        ({"model.gates": (GateSpec(),), "model.ffn_dim": 500}, "model.ffn_dim", "multiple of"),
        ({"data.source": "data/web=heavy"}, "data.source", "package.module:function"),
        ({"data.source": "data/web=0.5,data/code=0"}, "data.source", "FOLDER=0.7"),
        ({"data.source": "data/web,data/web"}, "data.source", "twice"),
        ({"optim.schedule": "wsd"}, "optim.decay_steps", "at least 2"),
        ({"optim.decay_steps": 5}, "optim.decay_steps", "wsd"),
        ({"optim.schedule": "wsd", "optim.decay_steps": 10_000}, "optim.decay_steps", "train.steps"),
        ({"train.accumulation": 3}, "train.accumulation", "batch_size"),
        ({"train.ema_decay": 1.0}, "train.ema_decay", "decay rate"),
        ({"train.keep_every": 30}, "train.keep_every", "checkpoint_every"),
        ({"train.keep_best": True, "train.checkpoint_every": 30}, "train.keep_best", "eval_every"),
    ],
)
def test_refusals_name_field_value_and_remedy(changes, field, says):
    with pytest.raises(ConfigError) as error:
        override(Config(), changes)
    assert error.value.field == field
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"position": "g5", "granularity": "headwise"}, "granularity"),
        ({"position": "g5", "sharing": "shared"}, "sharing"),
        ({"source": "independent", "bias": True}, "bias"),
        ({"bias_init": 1.0}, "bias_init"),
        ({"init_scale": -1.0}, "init_scale"),
        ({"source": "independent", "init_scale": 0.5}, "init_scale"),
    ],
)
def test_gates_that_cannot_work_are_refused(values, field):
    with pytest.raises(ConfigError) as error:
        GateSpec(**values)
    assert error.value.field == field


@given(gate_specs(), st.integers(1, 16), st.sampled_from([8, 32, 128]))
@settings(max_examples=100, deadline=None)
def test_matched_ffn_is_the_nearest_multiple(spec, width, multiple):
    ungated = ModelConfig(ffn_dim=128 * width + 256, ffn_multiple=multiple)
    gated = dataclasses.replace(ungated, gates=(spec,))

    def difference(ffn):
        return abs(gated.gate_params + 3 * gated.d_model * (ffn - ungated.ffn_dim))

    assert (ungated.ffn_dim - gated.ffn_width) % multiple == 0
    assert difference(gated.ffn_width) <= difference(gated.ffn_width + multiple)
    assert difference(gated.ffn_width) <= difference(gated.ffn_width - multiple)
    assert dataclasses.replace(gated, match_params=False).ffn_width == ungated.ffn_dim


def test_a_field_that_came_later_leaves_older_fingerprints_alone():
    """The two that runs of before those fields have, and what such a field changes when it is set."""
    from experiments.sinkbench import sinkbench_config

    assert tiny().run_name == "corpus-baseline-s0-8a7b501dab"
    assert sinkbench_config().run_name == "sinkbench-baseline-s0-1f5d8c7e45"
    for field, value in (("train.z_loss", 1e-4), ("train.accumulation", 2), ("optim.schedule", "linear")):
        assert override(tiny(), {field: value}).fingerprint() != tiny().fingerprint()
    for field, value in (("train.probe_every", 5), ("data.workers", 4), ("train.keep_best", True)):
        changes = {field: value, "train.checkpoint_every": 100, "train.eval_every": 100}
        assert override(tiny(), changes).fingerprint() == tiny().fingerprint()


def test_differences_are_told_apart():
    other = override(tiny(), {"optim.b2": 0.9, "train.log_every": 3, "model.gates": (GateSpec(),)})
    mathematical, cosmetic = differences(tiny(), other)
    assert mathematical == {"model.gates": ((), (GateSpec(),)), "optim.b2": (0.95, 0.9)}
    assert cosmetic == {"train.log_every": (10, 3)}
    assert differences(other, other) == ({}, {})


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/web", "web"),
        ("/a/b/my texts/", "my-texts"),
        ("gs://bucket/web=0.7, data/code=0.3", "web+code"),
        ("experiments.sinkbench:sinkbench", "sinkbench"),
    ],
)
def test_run_names_say_what_was_trained_on(source, name):
    assert override(tiny(), {"data.source": source}).run_name.startswith(f"{name}-baseline-s0-")


def test_one_mixture_has_one_spelling():
    """And so one run, however it was asked for."""
    named = lambda source: override(tiny(), {"data.source": source}).run_name  # noqa: E731
    assert named("data/mine") == named("data/mine/") == named(" data/mine=0.5") != named("data/other")
    assert named("a=0.7,b=0.3") == named("a/=7, b=3") != named("a=3,b=7")
    third = override(tiny(), {"data.source": "a,b,c"})
    assert from_dict(Config, json.loads(to_json(third))) == third


def test_mixture_weights_sum_to_one():
    mixture = override(tiny(), {"data.source": "gs://bucket/web=6,data/a=b=3"}).data.mixture()
    assert mixture == {"gs://bucket/web": pytest.approx(2 / 3), "data/a=b": pytest.approx(1 / 3)}
