#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data and experiments/lds_main/run.sh done, which
# trains the small runs and builds bench-out/cc-completion and cc-all. The larger runs take two minutes each of an idle
# core; a kill costs the run in flight.
set -e
for runs in cc-topic-2m cc-format-1m; do
  grasp retrain --config experiments/environments/$runs.yaml --out bench-out/environments/$runs
  python experiments/keep.py bench-out/environments/$runs experiments/environments/$runs
done
small=experiments/environments/cc-format larger=experiments/environments/cc-format-1m
python -m experiments.sizes.sizes --out experiments/sizes/format.json \
  --runs "0.36 M=$small" --runs "1.0 M=$larger" --art "0.36 M=bench-out/cc-completion"
python -m experiments.sizes.sizes --out experiments/sizes/format-all.json --loss all \
  --runs "0.36 M=$small" --runs "1.0 M=$larger" --art "0.36 M=bench-out/cc-all"
grasp build --config experiments/artifacts/cc-completion-2m.yaml --out bench-out/cc-completion-2m
python -m experiments.sizes.sizes --out experiments/sizes/topic.json \
  --runs "0.36 M=experiments/environments/cc-topic" --runs "2.0 M=experiments/environments/cc-topic-2m" \
  --art "0.36 M=bench-out/cc-completion" --art "2.0 M=bench-out/cc-completion-2m"
