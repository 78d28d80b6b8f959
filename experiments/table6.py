"""The paper's Table 6: switch heads, several value (and key) projections of which a router takes the best.

`python -m experiments.table6` trains `moe_tiny` in 6 variants with 3 seeds each. The last row, 1 top 1, is the headwise
value gate of Table 1 by another name: the two must learn the same but for what their random numbers make of it.
"""

from experiments import perplexity, study
from experiments.study import ScaledArgs, Study


def build(args: ScaledArgs) -> Study:
    return perplexity.build("table6", args, "Switch heads")


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
