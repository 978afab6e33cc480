"""Build an artifact: two loops over the rows of a corpus, through the model.

In: settings, or a model, a corpus and targets in memory. Out: a finished artifact directory. Read `build` first:

    plan_build       settings and objects -> a plan; nothing is computed                      `build_plan`
    train_proxy      for a new model, without one: a small model in model/                    `proxy`
    warm_up          for fine-tuning by a recipe: the model after half of it, in model/       `warm_up`
    build_artifact   the two loops: moments, then scores of all rows, in shards               `pipeline`
    replay_targets   with a replay: one more array of relevance                               `add_replay`

Each of them is resumed by the same call. Then read `score_shard`, the work of the model on one shard, in this process
or on a cluster (`engine`). `grasp.artifact.manifest` lists the files.
"""
