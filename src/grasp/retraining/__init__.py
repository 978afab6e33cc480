"""Models trained on subsets of a corpus: the runs that `grasp.runs` reads and judges by.

In: subsets, a corpus, units and a recipe. Out: an environment, filled run by run. To be read in this order (the verb
retrain is in `grasp.api`):

    plan           recipe, tokenizer, rows, units and subsets, decided and written down before any run
    worker         one run after the other, by any number of workers
    train_command  runs that a command of the user's trains
"""
