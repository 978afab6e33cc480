"""A reference model: what it knows of a token, and its output head.

In: a Hugging Face checkpoint or an image classifier, rows of token ids or pictures. Out: hidden states and logits at
chosen positions. Read `causal_lm` first; `classifier` does the same for pictures. `checkpoint` loads what both need.
"""
