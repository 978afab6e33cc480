#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data and experiments/lds_main/run.sh done, which
# trains the small runs and builds bench-out/cc-completion. Half an hour of one core for the larger runs, ten minutes for
# the short ones; a kill costs the run in flight.
set -e
ENVIRONMENTS=bench-out/environments
for name in cc-topic-2m cc-topic-short; do
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name --quiet
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
done
grasp build --config experiments/artifacts/cc-completion-2m.yaml --out bench-out/cc-completion-2m --quiet
python -m experiments.sizes.sizes --out experiments/sizes/sizes.json \
  --runs "0.36 M=experiments/environments/cc-topic" --runs "2.0 M=experiments/environments/cc-topic-2m" \
  --runs "0.36 M, short=experiments/environments/cc-topic-short" \
  --art "0.36 M=bench-out/cc-completion" --art "2.0 M=bench-out/cc-completion-2m"
