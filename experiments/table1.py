"""The paper's Table 1: where a gate stands, how fine it is, and what else its parameters could have bought.

`python -m experiments.table1` trains `moe_tiny` in 15 variants with 3 seeds each: perplexity at equal
tokens, and on the four tasks of the capability bench.
"""

from experiments import perplexity, study
from experiments.study import ScaledArgs, Study


def build(args: ScaledArgs) -> Study:
    return perplexity.build("table1", args, "Position, granularity and sharing")


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
