"""From predictions to decisions: rows under a budget, mixtures of slices, and how far to trust them.

Import from the modules. `datatrove_step` is the one module that needs an extra.
"""
