"""Kernels: how much training on a row should lower the loss of a unit. One file per kernel.

In: batches of hidden states, residuals and gradients. Out: relevance of each row to each unit, and sketches of rows.
Read `kernel` first (the interface), then `output_layer` (the main kernel); `gradient` covers all layers. `whitening`
has the moments that kernels share.
"""
