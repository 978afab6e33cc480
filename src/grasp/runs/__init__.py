"""Training runs on subsets of a corpus: storage, evaluation of predictions, and calibration of predictions.

Input: retrained or imported runs. Output: agreement of predictions with runs, and predictions with intervals. Modules
in reading order (`grasp.api.evaluate` is the public function; `grasp.retraining` creates runs):

    retrained         `RetrainedRuns`: runs in a directory, their subsets and utilities
    table             `RunTable`: imported runs; `import_runs` and `results_files` read them from other formats
    alignment         `Alignment`: runs matched with an artifact, with their subsets in its rows
    predictions       predictions of subsets, and files of them
    evaluation        metrics of predictions on runs; `metrics` has the mathematics
    calibration       predictions in the unit of the runs with intervals; `gaussian_process` has the mathematics
"""
