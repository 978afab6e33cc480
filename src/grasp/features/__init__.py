"""From hidden states and logits to what the artifact keeps: pooling, residuals, moments, whitening, sketches."""
