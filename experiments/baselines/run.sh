#!/bin/bash
# From the root of a checkout, after experiments/lds_main/run.sh has made the environments and the artifact. Every
# method's scores are kept in the artifact: a kill costs the block in flight, and what was scored is not scored again.
# About an hour of one core without the lasso, cheapest first; most of it are the forms over all layers and the second order of inrun.
set -e
ARTIFACT=bench-out/cc-completion
REFERENCE=bench-out/environments/cc-topic/reference/seed-0
HERE=experiments/baselines
for name in cc-topic cc-format; do
  label=${name#cc-}
  { cat $HERE/methods.yaml; echo "oracle-ridge-$label-share-of-subset: {method: datamodels, penalty: ridge, sees: $label}"; } \
    > bench-out/methods-$name.yaml
  grasp evaluate $ARTIFACT --runs experiments/environments/$name \
    --protocol experiments/lds_main/protocol.yaml --method-settings bench-out/methods-$name.yaml \
    --checkpoints $REFERENCE --json $HERE/$name.json
done
# The lasso over masks as the source has it: 640 units and five tasks, each with a strength of its own, 8 folds. More
# than an hour of one core, so on the environment that is held out alone.
grasp evaluate $ARTIFACT --runs experiments/environments/cc-format --methods datamodels \
  --json $HERE/lasso.json
# Oracle-selected, on the development environment and its first target alone, as the paper's appendix does.
grasp evaluate $ARTIFACT --runs experiments/environments/cc-topic --target sciq \
  --method-settings $HERE/search.yaml --checkpoints $REFERENCE --json $HERE/search.json
python -m experiments.baselines.table $HERE/cc-topic.json $HERE/cc-format.json $HERE/lasso.json $HERE/search.json \
  --rows 10482 --out $HERE
