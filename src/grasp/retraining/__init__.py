"""Models trained on subsets of a corpus: an optional subpackage that is found by entry points.

Input: a corpus, targets, and a family of subsets. Output: retrained runs with their losses, which `grasp.runs` compares
with predictions.

    retrain          the function `grasp.retrain`; `settings` has the settings in `run.yaml`
    plan             validate and write recipe, tokenizer, rows, units and subsets before the first run
    worker           train and score the runs, with any number of workers
    train_command    runs that are trained by a command of the user
    check_selection  compare models trained on a selection with those of other rows

Start with `worker.retrain`; `commands` adds `grasp retrain` and `grasp check-selection`.
"""
