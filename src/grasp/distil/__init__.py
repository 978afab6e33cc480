"""Scorers of text that need no model: what an artifact says of rows, learned by their words, and applied to any corpus.

In: an artifact; then any text. Out: a scorer in one file, and corpora with scores. Read `distil` first;
`datatrove_step` is the one module that needs an extra.
"""
