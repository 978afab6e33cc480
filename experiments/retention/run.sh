#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; about two hours of one core.
set -e
ENVIRONMENTS=bench-out/environments
for percent in 20 50 80 90 95 99; do
  name=cc-uniform-$percent
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name --quiet
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
  grasp evaluate bench-out/cc-completion --environment experiments/environments/$name \
    --json experiments/retention/$name.json --csv bench-out/$name.csv
done
