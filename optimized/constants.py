"""Numbers as tensors of no dimension, made once: a Python number costs a conversion at every call, a tensor
doesn't.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def const(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A CPU tensor; every device takes it as a scalar."""
    return torch.tensor(value, dtype=dtype)
