"""Whether the torch backend of sums has a GPU to work on; torch is loaded only for jobs that repay it."""

import importlib.util
import shutil
import sys
from types import ModuleType

# Multiply-adds of one dense block from which loading torch and moving the block to a GPU are repaid.
LARGE_DENSE = 20_000_000_000


def torch_installed() -> bool:
    """Whether the fast way is there; loads nothing."""
    return importlib.util.find_spec("torch") is not None


def cuda_backend(multiply_adds: int) -> ModuleType | None:
    """`grasp.predict.sweep_torch` where the job is large and torch sees a CUDA device, else None.

    On a machine without a driver torch is not loaded to be asked.
    """
    if multiply_adds < LARGE_DENSE or not torch_installed():
        return None
    if "torch" not in sys.modules and shutil.which("nvidia-smi") is None:
        return None
    from grasp.predict import sweep_torch  # noqa: PLC0415 - torch is loaded for large jobs only

    return sweep_torch if sweep_torch.device() == "cuda" else None
