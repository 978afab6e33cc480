"""Runs: models trained on parts of a corpus, how well each did, and what that says of predictions.

In: runs that were retrained here, or imported. Out: agreement of predictions with runs, and predictions with intervals.
To be read in this order (the verb evaluate is in `grasp.api`; `grasp.training` makes runs):

    environment  retrained runs on disk: what was trained on what, and what came of it
    table        runs that somebody else made, as readers find them
    joined       runs beside an artifact: whether they fit, what they were trained on in its rows, what it predicts
    evaluate     figures of predictions beside what came out: ours come from joined, others' from predictions or
                 `grasp.methods`; metrics are the figures
    learning     what runs teach a predictor, with intervals in their unit; learned has the mathematics
"""
