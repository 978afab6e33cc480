"""Frozen scoring protocols, and prediction by them from an artifact."""
