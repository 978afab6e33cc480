#!/bin/bash
# From the root of a checkout, with the corpora beside it in ../shared/data. The retraining takes about four hours of
# one core (two processes on two cores share it; a kill costs the run in flight); the rest takes minutes.
set -e
ENVIRONMENTS=bench-out/environments
OUT=experiments/lds_main
for name in cc-topic cc-format; do
  grasp retrain --config experiments/environments/$name.yaml --out $ENVIRONMENTS/$name --quiet
  python experiments/keep.py $ENVIRONMENTS/$name experiments/environments/$name
done
for loss in completion all; do
  grasp build --config experiments/artifacts/cc-$loss.yaml --out bench-out/cc-$loss --quiet
done
# Selection, on topic mixtures and two tasks. What ships is src/grasp/protocol/default.yaml, the first of additive.yaml.
for family in additive family; do
  grasp calibrate bench-out/cc-completion bench-out/cc-all --environment experiments/environments/cc-topic \
    --family $OUT/$family.yaml --out bench-out/$family-protocol.yaml
done
cp bench-out/family-protocol.yaml $OUT/protocol.yaml
cp bench-out/family-protocol.provenance.json $OUT/protocol.provenance.json
# Test, on format mixtures, and on the tasks of the topic mixtures that nothing was selected on.
HELD=commonsense_qa,basic_skills_common_knowledge,basic_skills_logical_reasoning
for loss in completion all; do
  test() {
    grasp evaluate bench-out/cc-$loss --environment experiments/environments/$1 --protocol $OUT/protocol.yaml \
      --oracle ridge --methods bm25 --json $OUT/$1-$loss.json --csv bench-out/$1-$loss.csv "${@:2}"
    python $OUT/explain.py bench-out/cc-$loss experiments/environments/$1 --out $OUT/explain-$1-$loss.json
  }
  test cc-format
  if [ $loss = all ]; then HELD=${HELD//,/@all,}@all; fi
  test cc-topic --targets $HELD
done
python experiments/table.py $OUT/cc-{format,topic}-{completion,all}.json --title "Agreement with retraining" --out $OUT/table.md
