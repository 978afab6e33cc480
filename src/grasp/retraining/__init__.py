"""Train models on subsets of a corpus, and record their losses, which `grasp.runs` compares with predictions.

    plan           validate and write recipe, tokenizer, rows, units and subsets before the first run
    worker         train and score the runs, with any number of workers
    train_command  runs that are trained by a command of the user

Start with `worker.retrain`. The public function is `grasp.retrain` in `grasp.api`.
"""
