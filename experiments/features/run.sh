#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh; two minutes of one core a line. What else the one
# forward pass can give, on the development environment and its two development tasks alone.
set -e
HERE=experiments/features
REFERENCE=bench-out/environments/cc-topic/reference
TASKS=sciq,openbookqa
try() { # name, then flags of grasp build
  local art=bench-out/features-$1
  grasp build --config experiments/artifacts/cc-completion.yaml --targets $TASKS --set "features.kernels=[output_layer, embedding, hidden_sketch, residual_sketch]" \
    --out $art "${@:2}"
  grasp evaluate $art --runs experiments/environments/cc-topic --target $TASKS --json $HERE/$1.json
}
try base
try tail32 --set features.positions=tail:32
try stride4 --set features.positions=stride:4
try alpha05 --set features.alpha=0.5
try eps1 --set features.epsilon=1
try checkpoint-200 --model $REFERENCE/seed-0/checkpoint-200
try seed-1 --model $REFERENCE/seed-1
for loss in completion all; do
  suffix=${loss#completion}
  others="--beside bench-out/features-checkpoint-200 --beside bench-out/features-seed-1"
  if [ $loss = all ]; then others=; fi
  python -m experiments.features.transforms bench-out/cc-$loss --runs experiments/environments/cc-topic $others \
    --targets sciq${suffix:+@all},openbookqa${suffix:+@all} --out $HERE/transforms-$loss.json
done
python experiments/table.py $HERE/{base,tail32,stride4,alpha05,eps1,checkpoint-200,seed-1}.json \
  --title "Feature settings, on development results" --out $HERE/table.md
