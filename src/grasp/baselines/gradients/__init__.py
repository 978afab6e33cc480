"""Per-example gradients of a causal LM in factorised form: exact inner products, projections and curvature."""
