"""Compare ways to run one attention of a model on clusters that you do not have. No torch is needed.

python examples/plan_cluster.py
"""

import weft

mask = weft.mask("sta:dense=0.1", heads=40, grid=(21, 45, 80))
for cluster in ("8xh100", "2x8xh100"):
    print(f"\n{cluster}")
    for name in ("ulysses", "ring", "auto"):
        plan = weft.plan(mask, cluster, head_dim=128, strategy=name)
        print(plan)
