"""The paper's Table 1: where a gate stands, how fine it is, and what else its parameters could have bought.

`python -m experiments.table1` trains `moe_tiny` in 15 variants with 3 seeds each: perplexity at equal
tokens, and on the four tasks of the capability bench.
"""

from experiments import perplexity, study
from experiments.report import PERPLEXITY, change
from experiments.study import ScaledArgs, Study

WIDER = ("kv_heads=8", "q_heads=48", "+4 experts")
GATED = ("SDPA elementwise", "value elementwise", "SDPA headwise", "SDPA head-shared", "key elementwise")


def build(args: ScaledArgs) -> Study:
    findings = [change(PERPLEXITY, "baseline", label) for label in (*WIDER, *GATED)]
    return perplexity.build("table1", args, "Position, granularity and sharing", findings)


if __name__ == "__main__":
    study.main(ScaledArgs, build, __doc__)
