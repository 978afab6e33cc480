"""Shared parts of gradient methods: exact inner products, projections and curvature of per-example gradients."""
