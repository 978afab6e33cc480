#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; about an hour of one core. 8 subsets a ratio, one seed.
set -e
ENVIRONMENTS=bench-out/environments
for percent in 20 50 80 90 95 99; do
  name=cc-uniform-$percent
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
  grasp evaluate bench-out/cc-completion --runs experiments/environments/$name \
    --protocol experiments/lds_main/protocol.yaml --methods bm25 --json experiments/retention/$name.json --csv bench-out/$name.csv
done
