"""Training models on subsets of a corpus: it makes the runs that `grasp.runs` reads and judges by.

In: subsets, a corpus, units and a recipe. Out: an environment, filled run by run; or a model with its checkpoints. To
be read in this order (the verb retrain is in `grasp.verbs`):

    plan      recipe, tokenizer, rows, units and subsets, decided and written down before any run
    retrain   one run after the other, by any number of workers
    train     one model, or K at once, by a recipe; llama is the model
    command   runs that a command of the user's trains
"""
