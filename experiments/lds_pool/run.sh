#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data; about two hours of one core.
set -e
ENVIRONMENTS=bench-out/environments
python experiments/lds_pool/decontaminate.py ../shared/data/pool.parquet bench-out/pool_decontaminated.parquet
grasp retrain --config experiments/environments/pool-source.yaml --out $ENVIRONMENTS/pool-source
python experiments/keep.py $ENVIRONMENTS/pool-source experiments/environments/pool-source
echo "{bm25: {}, oracle-ridge-source-share-of-subset: {method: datamodels, penalty: ridge, sees: source}}" \
  > bench-out/methods.yaml
for loss in completion all; do
  grasp build --config experiments/artifacts/pool-$loss.yaml --out bench-out/pool-$loss
  grasp evaluate bench-out/pool-$loss --runs experiments/environments/pool-source \
    --protocol experiments/lds_main/protocol.yaml --method-settings bench-out/methods.yaml \
    --json experiments/lds_pool/$loss.json
done
python experiments/table.py experiments/lds_pool/{completion,all}.json \
  --title "Agreement with retraining on a pool of sources" --out experiments/lds_pool/table.md
