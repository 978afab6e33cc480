"""What was trained on and what came out, and what that says of predictions.

In: subsets and a corpus to retrain on, or environments that exist. Out: environments, agreement of predictions with
retraining, and intervals. To be read in this order (the verbs retrain and evaluate are in `grasp.verbs`):

    environment  runs on disk: environment_files has what was trained on what, and the tables
    retrain      one run after the other, by any number of workers; retrain_plan decides everything before
    train        one model, or K at once, by a recipe; llama is the model
    evaluate     figures of predictions beside what retraining gave: ours come from joined, others' from predictions and
                 methods; metrics are the figures
    contract     what a published method is, and what it may look at
    table        runs that somebody else made, as readers find them; imported makes them an environment of an artifact
    learning     what runs teach a predictor, with intervals in their unit: learned is the fit, covariance its kernels

Only the trainers (retrain, train, llama and what they use) load torch.
"""
