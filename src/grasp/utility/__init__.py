"""The paper's equations on arrays: relevance, geometry, standardisation, prediction. numpy and scipy only.

Import from the modules. `sweep_torch` is the one module that may load torch; `sweep` chooses it.
"""
