"""What counts as diverged, the largest stable learning rate, and the claims that are made of them."""

import json
import math

import numpy as np
import pytest

from experiments import stability
from experiments.report import F_ATTN, M_ACT, Measured
from experiments.stability import diverged, follows, largest_stable, precision_gap, stable_rates
from experiments.study import ScaledArgs
from tests.test_report import fake_result

RATES = stability.scales()["cpu"].rates


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("GATTN_HOME", str(tmp_path))


def curve(*losses, initial=4.0, vocab=65):
    """A result with this training curve."""
    return {"curve": {"loss": list(losses)}, "eval": {"initial_loss": initial}, "data": {"vocab_size": vocab}}


FALLING = np.linspace(4.0, 1.8, 100)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (curve(*FALLING), False),
        (curve(*FALLING, *[1.8, 2.2] * 20), False),
        (curve(*FALLING, *[2.1] * 20), True),  # more than a tenth of 2.2 lost
        (curve(*FALLING, *[2.0] * 20), False),
        (curve(*np.linspace(4.0, 2.7, 100)), True),  # less than ln(65) / 3 learned
        (curve(*np.linspace(4.0, 2.5, 100)), False),
        (curve(*FALLING, *[9.0] * 3, *[1.8] * 50), False),  # a spike that it recovers from
        (curve(*FALLING) | {"diverged": {"step": 100}}, True),
    ],
)
def test_diverged(result, expected):
    assert diverged(result) == expected


def test_the_largest_stable_rate_is_the_last_before_the_first_that_diverges():
    """Also where a higher one holds again, and none where the lowest diverges; seeds that miss a run are left out."""
    good, bad = curve(*FALLING), curve(*FALLING) | {"diverged": {}}
    by_rate = {
        0.03: [good, good, bad, good, good],
        0.01: [good, bad, bad, bad, None],
        0.003: [good, good, good, bad, good],
    }
    assert largest_stable(by_rate) == [0.03, 0.003, 0.003, 0.0]


def measured(tmp_path, per_variant, seeds=2):
    """The deep part with fake results: by variant the highest stable rate, M-Act and F-Attn."""
    part = stability.build(ScaledArgs(seeds=seeds)).parts[0]
    for name, (highest, m_act, f_attn) in per_variant.items():
        for rate in RATES:
            for run in part.runs([f"{name}, LR {rate:g}"]):
                result = fake_result(run, f_attn)
                result["probes"]["m_act"] = m_act
                result["curve"]["loss"] = list(FALLING)
                if rate > highest:
                    result["diverged"] = {"step": 3, "reason": "nan"}
                write(run, result)
    return part, Measured(part.section())


def write(run, result):
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps(result))


def test_claims_are_counted_over_pairs_of_variants(tmp_path):
    """Stability follows M-Act here, and not F-Attn."""
    facts = {
        "baseline": (0.003, 400.0, 0.3),
        "SDPA elementwise": (0.01, 150.0, 0.08),
        "SDPA headwise": (0.01, 120.0, 0.09),
        "sandwich norm": (0.03, 20.0, 0.5),
    }
    _, found = measured(tmp_path, facts)
    assert follows(M_ACT, RATES)(found) == (
        "Less M-Act at LR 0.003, a larger stable learning rate: holds; so it is in 5 of 5 pairs of variants, 1 pairs "
        "do not differ."
    )
    assert "does not hold; so it is in 2 of 5 pairs" in follows(F_ATTN, RATES)(found)
    assert "baseline 0.003, 0.003; SDPA elementwise 0.01, 0.01;" in stable_rates(RATES)(found)
    assert "sandwich norm at least 0.03, at least 0.03." in stable_rates(RATES)(found)


def test_a_variant_without_a_value_is_named(tmp_path):
    """Its runs at the lowest rate were not finite; a tie in the measure is no agreement."""
    facts = {"baseline": (0.0, 400.0, 0.3), "SDPA elementwise": (0.01, 150.0, 0.3), "SDPA headwise": (0.03, 120.0, 0.3)}
    part, _ = measured(tmp_path, facts)
    for run in part.runs([f"baseline, LR {RATES[0]:g}"]):
        result = json.loads((run.folder / "result.json").read_text())
        del result["probes"]
        (run.folder / "result.json").write_text(json.dumps(result))
    found = Measured(part.section())
    assert follows(M_ACT, RATES)(found).endswith(
        "holds; so it is in 1 of 1 pairs of variants; without a value: baseline."
    )
    assert "no two variants" in follows(F_ATTN, RATES)(found)
    assert "baseline below 0.003, below 0.003;" in stable_rates(RATES)(found)


def test_what_was_not_trained_is_said(tmp_path):
    part = stability.build(ScaledArgs(seeds=1)).parts[0]
    text = stable_rates(RATES)(Measured(part.section()))
    assert "baseline not measured" in text
    assert "too few pairs" in precision_gap(part, ["baseline"], RATES)(Measured(part.section()))


@pytest.mark.parametrize(("slope", "says"), [(0.01, "+1.00 (100%"), (-0.01, "-1.00 (100%"), (0.0, "undefined")])
def test_how_the_gap_between_precisions_goes_with_m_act(tmp_path, slope, says):
    """Where the gap is a linear function of its logarithm, and another constant at every learning rate."""
    parts = stability.build(ScaledArgs(seeds=3)).parts
    names = ["baseline", "SDPA elementwise"]
    for part in (parts[0], parts[2]):
        for name in names:
            for place, rate in enumerate(RATES[:2]):
                for number, run in enumerate(part.runs([f"{name}, LR {rate:g}"])):
                    m_act = 10.0 * (number + 1) * (5 if name == "baseline" else 1)
                    result = fake_result(run, 0.1)
                    result["probes"]["m_act"] = m_act
                    result["eval"]["loss"] = 2.0 + (place + slope * math.log(m_act) if part is parts[2] else 0.0)
                    result["curve"]["loss"] = list(FALLING)
                    write(run, result)
    for run in parts[2].runs([f"baseline, LR {RATES[2]:g}"]) + parts[0].runs([f"baseline, LR {RATES[2]:g}"]):
        write(run, fake_result(run, 0.1) | {"diverged": {"step": 1}})
    text = precision_gap(parts[0], names, RATES)(Measured(parts[2].section()))
    assert f"over 12 pairs, each less the mean of its learning rate: {says}" in text
    assert "(3 pairs left out: one of the two diverged)" in text


def test_every_scale_has_rows_of_its_own_and_the_paper_rates_stand_at_the_pod():
    folders = []
    for scale in ("cpu", "chip", "pod"):
        runs = stability.build(ScaledArgs(scale=scale, seeds=1, dry_run=True)).runs()
        assert len(runs) == 3 * (4 + 2 + 2)
        folders += {run.folder for run in runs}
    assert len(set(folders)) == len(folders) == 72
    assert {0.004, 0.008} < set(stability.scales()["pod"].rates)
