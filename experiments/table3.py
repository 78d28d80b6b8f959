"""The paper's Table 3: is it the gate's non-linearity, its multiplication, or merely a norm after attention?

`python -m experiments.table3` trains `moe_tiny` in 7 variants, four of which are Table 1's, with 3 seeds each.
"""

from experiments import perplexity, study
from experiments.report import PERPLEXITY, ordering
from experiments.study import ScaledArgs, Study

GATED, ADDITIVE, BARE = (
    "SDPA elementwise gate",
    "SDPA additive gate, silu",
    "SDPA SiLU (activation only, no parameters)",
)


def build(args: ScaledArgs) -> Study:
    findings = [ordering(PERPLEXITY, GATED, ADDITIVE, BARE, "baseline")]
    return perplexity.build("table3", args, "Non-linearity between value and output projection", findings)


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
