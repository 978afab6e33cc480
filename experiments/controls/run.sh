#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; minutes. Weights of every control are selected on the
# development environment, all of them are tested on the held-out one.
set -e
for loss in completion all; do
  grasp evaluate bench-out/cc-$loss --environment experiments/environments/cc-format \
    --controls --development experiments/environments/cc-topic --family experiments/lds_main/family.yaml \
    --json experiments/controls/$loss.json --csv bench-out/controls-$loss.csv
done
