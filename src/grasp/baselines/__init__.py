"""Published attribution methods, behind one interface: `grasp.methods.contract.RowMethod` or `SubsetMethod`.

One module per method. The docstring of its class names the paper (Source), says how the authors run it (As published)
and what differs here (Deviation); settings and costs are in docs/baselines.md. Most methods derive from
`stored.BlockMethod`, which caches scores on disk; read it first. Methods on gradients share `gradients/`.
"""
