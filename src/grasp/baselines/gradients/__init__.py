"""What gradient methods make of per-example gradients: exact inner products, projections and curvature."""
