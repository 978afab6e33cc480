#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; minutes. Weights of every control are selected on the
# development environment, all of them are tested on the held-out one. Once over token+input, once over the paper's
# relevance; negative relevance as it is.
set -e
HERE=experiments/controls
for family in family pooled; do
  grasp controls bench-out/cc-completion --runs experiments/environments/cc-format \
    --development experiments/environments/cc-topic --family $HERE/$family.yaml \
    --json $HERE/$family.json --csv bench-out/controls-$family.csv
done
grasp controls bench-out/cc-all --runs experiments/environments/cc-format \
  --development experiments/environments/cc-topic --family $HERE/family.yaml \
  --json $HERE/family-all.json --csv bench-out/controls-all.csv
python experiments/table.py $HERE/{family,pooled,family-all}.json --title "Controls and ablations" --out $HERE/table.md
