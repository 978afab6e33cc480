"""Training runs on subsets of a corpus: storage, evaluation of predictions, and calibration of predictions.

Input: retrained or imported runs. Output: agreement of predictions with runs, and predictions with intervals. Modules
in reading order (`grasp.api.evaluate` is the public function; `grasp.retraining` and `grasp.mixing` create runs):

    training_runs     `TrainingRuns`: subsets and utilities of trained models, of whatever origin, and their record
    utility_tables    the table of results of all runs, and its files
    retrained         `RetrainedRuns`: retrained runs in a directory
    table             `RunTable`: imported runs; `metric_names` has what the name of a metric says
    imported_runs     express imported runs in the rows and targets of an artifact
    alignment         `Alignment`: runs matched with an artifact, with their subsets in its rows
    predictions       predictions of subsets
    evaluation        metrics of predictions on runs; `metrics` has the mathematics
    calibration       predictions in the unit of the runs with intervals; `gaussian_process` has the mathematics, in
                      `subset_features`, `subset_covariance` and `marginal_likelihood`
"""
