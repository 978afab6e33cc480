#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; 31 retrains, about half an hour of one core. A third
# seed for the first 30 subsets of cc-format: `evaluate` prints the mean and deviation over seeds; `reliability.py` what
# averaging more seeds does to the agreement with one and the same prediction.
set -e
ENVIRONMENTS=bench-out/environments
grasp retrain --config experiments/environments/cc-seeds.yaml --out $ENVIRONMENTS/cc-seeds
python -m experiments.seeds.join experiments/environments/cc-format $ENVIRONMENTS/cc-seeds experiments/environments/cc-seeds
grasp evaluate bench-out/cc-completion --runs experiments/environments/cc-seeds \
  --json experiments/seeds/completion.json --csv bench-out/cc-seeds.csv
python -m experiments.seeds.reliability bench-out/cc-completion experiments/environments/cc-seeds \
  --out experiments/seeds/reliability.json
