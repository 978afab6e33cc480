"""Names of kernels in the stored tables of experiments, and the kernels that they stand for."""

KERNEL_OF = {
    "token": "output_layer",
    "input": "embedding",
    "neighbour": "knn",
    "shift": "hidden_bias",
    "tilt": "hidden_linear",
}
