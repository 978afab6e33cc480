"""The arithmetic of relevance: from hidden states and logits to what the artifact keeps.

In: hidden states and logits of a batch. Out: relevance by each kernel, and sketches. Read `residuals` (the mistakes of
the model), then `token_match` (the main kernel); `pooled_match` is the paper's, `gradient_match` looks at all layers.
`moments` brings both factors to one scale.
"""
