#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; 90 retrains, about an hour and a half of one core. The
# 30 subsets are the first 30 of cc-format, with a third seed: `evaluate` prints the mean and deviation over seeds.
set -e
ENVIRONMENTS=bench-out/environments
grasp retrain --config experiments/environments/cc-seeds.yaml --out $ENVIRONMENTS/cc-seeds --quiet
python experiments/keep.py $ENVIRONMENTS/cc-seeds experiments/environments/cc-seeds
grasp evaluate bench-out/cc-completion --environment experiments/environments/cc-seeds \
  --json experiments/seeds/completion.json --csv bench-out/cc-seeds.csv
