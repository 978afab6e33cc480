"""Does a prediction rank interventions as retraining does: environments, metrics, oracles, controls.

Only `retrain` loads torch; import it by its own name.
"""
