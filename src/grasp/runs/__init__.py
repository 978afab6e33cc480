"""What was trained on and what came out, and what that says of predictions.

In: subsets and a corpus to retrain on, or environments that exist. Out: environments, agreement of predictions with
retraining (`evaluate`, `metrics`), protocols selected on development runs (`selection`) and intervals (`trust`). Read
`environment` first. Only the trainers (`retrain`, `recipe`, `stacked`, `training`, `llama`) load torch.
"""
