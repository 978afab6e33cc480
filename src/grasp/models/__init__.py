"""The reference model: hidden states, logits and residuals at selected positions, and gradients of rows as factors.

`checkpoint` loads Hugging Face checkpoints, `tokenizer` wraps tokenizers and chat templates, `causal_lm` and `head` run
the model, `forward_pass` and `residuals` extract features, `gradients` runs backward passes, and `unit_loss` evaluates
units. Start with `causal_lm.ReferenceModel`.
"""
