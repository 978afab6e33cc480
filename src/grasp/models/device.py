"""Where a model computes and in which numbers, as the settings name it."""

import torch

from grasp.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_of(name: str) -> torch.device:
    """The device that a setting names.

    Raises:
        ModelError: no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise ModelError(f"model.device: got `{name}`, expected auto, cpu, cuda or cuda:N") from err
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model.device: got `{name}`, but torch sees {torch.cuda.device_count()} CUDA devices; use `cpu` or `auto`"
        )
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The number format that a setting names."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What the settings call a number format.

    Raises:
        ModelError: one that they do not know.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ModelError(f"model: its weights are {dtype}, expected {', '.join(DTYPES)}; convert it, e.g. model.float()")
