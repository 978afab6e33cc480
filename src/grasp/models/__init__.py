"""A reference model: what it knows of a token, its output head, and gradients of rows by its weights.

In: a Hugging Face checkpoint, rows of token ids. Out: hidden states and logits at chosen positions; gradients as
factors. Read `causal_lm` first. `checkpoint` loads what it needs, `gradients` goes back through it.
"""
