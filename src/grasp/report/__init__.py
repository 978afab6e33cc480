"""Findings as one HTML file that needs no network: text, tables, figures, and a model of the slices to play with.

Nothing is computed here. Texts of the corpus are untrusted: they are escaped wherever they stand, and a
content-security-policy with the checksums of our own scripts keeps anything else from running.
"""

EXPLAINED = 8  # best rows of each target whose words are shaded, where the model is at hand
