#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data. The retraining takes about four hours of
# one core (two processes on two cores share it; a kill costs the run in flight); the rest takes minutes.
set -e
ENVIRONMENTS=bench-out/environments
OUT=experiments/lds_main
for name in cc-topic cc-format; do
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
done
for loss in completion all; do
  grasp build --config experiments/artifacts/cc-$loss.yaml --out bench-out/cc-$loss
done
# Selection, on topic mixtures and two tasks: `default` is what ships (src/grasp/predict/default_protocol.py), `selected` the
# full predictor with penalties, `signed` the same with geometry of either sign.
for pair in additive:default family:selected signed:signed; do
  grasp calibrate bench-out/cc-completion bench-out/cc-all --runs experiments/environments/cc-topic \
    --family $OUT/${pair%:*}.yaml --out bench-out/${pair#*:}.yaml
done
cp bench-out/selected.yaml $OUT/protocol.yaml
cp bench-out/selected.provenance.json $OUT/protocol.provenance.json
cp bench-out/signed.provenance.json $OUT/signed.provenance.json
# Test, on format mixtures, and on the tasks of the topic mixtures that nothing was selected on.
HELD=commonsense_qa,basic_skills_common_knowledge,basic_skills_logical_reasoning
for loss in completion all; do
  compare() {
    label=${1#cc-}
    echo "{bm25: {}, oracle-ridge-$label-share-of-subset: {method: datamodels, penalty: ridge, sees: $label}}" \
      > bench-out/methods.yaml
    grasp evaluate bench-out/cc-$loss --runs experiments/environments/$1 --protocol $OUT/protocol.yaml \
      --method-settings bench-out/methods.yaml --json $OUT/$1-$loss.json "${@:2}"
    python -m experiments.lds_main.explain bench-out/cc-$loss experiments/environments/$1 --out $OUT/explain-$1-$loss.json
  }
  compare cc-format
  if [ $loss = all ]; then HELD=${HELD//,/@all,}@all; fi
  compare cc-topic --target $HELD
  grasp evaluate bench-out/cc-$loss --runs experiments/environments/cc-format --protocol bench-out/signed.yaml \
    --json $OUT/signed-cc-format-$loss.json
done
python experiments/table.py $OUT/cc-{format,topic}-{completion,all}.json --title "Agreement with retraining" --out $OUT/table.md
