#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data. The retraining takes about four hours of
# one core (two processes on two cores share it; a kill costs the run in flight); the rest takes minutes.
set -e
ENVIRONMENTS=bench-out/environments
for name in cc-topic cc-format; do
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name --quiet
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
done
for loss in completion all; do
  grasp build --config experiments/artifacts/cc-$loss.yaml --out bench-out/cc-$loss --quiet
done
grasp calibrate bench-out/cc-completion --environment experiments/environments/cc-topic \
  --out experiments/lds_main/protocol.yaml
for loss in completion all; do
  for name in cc-topic cc-format; do
    grasp evaluate bench-out/cc-$loss --environment experiments/environments/$name \
      --protocol experiments/lds_main/protocol.yaml --oracle ridge \
      --json experiments/lds_main/$name-$loss.json --csv bench-out/$name-$loss.csv
  done
done
