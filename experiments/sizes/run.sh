#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data and experiments/lds_main/run.sh done, which
# trains the small runs and builds bench-out/cc-completion. The larger runs took an hour of a core that was shared; a
# kill costs the run in flight.
set -e
grasp retrain --config experiments/environments/cc-topic-2m.yaml --out bench-out/environments/cc-topic-2m --quiet
python experiments/keep.py bench-out/environments/cc-topic-2m experiments/environments/cc-topic-2m
grasp build --config experiments/artifacts/cc-completion-2m.yaml --out bench-out/cc-completion-2m --quiet
python -m experiments.sizes.sizes --out experiments/sizes/sizes.json \
  --runs "0.36 M=experiments/environments/cc-topic" --runs "2.0 M=experiments/environments/cc-topic-2m" \
  --art "0.36 M=bench-out/cc-completion" --art "2.0 M=bench-out/cc-completion-2m"
