"""What was trained on and what came out, and what that says of predictions.

In: environments, or runs that somebody else made. Out: agreement of predictions with runs, and predictions with
intervals. To be read in this order (the verb evaluate is in `grasp.verbs`; `grasp.training` makes runs):

    environment  retrained runs on disk: what was trained on what, and what came of it
    evaluate     figures of predictions beside what retraining gave: ours come from joined, others' from predictions or
                 `grasp.methods`; metrics are the figures
    table        runs that somebody else made, as readers find them; imported makes them an environment of an artifact
    learning     what runs teach a predictor, with intervals in their unit; learned has the mathematics
"""
