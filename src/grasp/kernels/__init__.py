"""The arithmetic of relevance: from hidden states and logits to what the artifact keeps.

In: hidden states and logits of a batch. Out: relevance by each kernel, and sketches. Read `residuals` (the mistakes of
the model), then `output_layer` (the main kernel); `pooled` is the paper's, `gradient` looks at all layers.
`whitening` brings both factors to one scale.
"""
