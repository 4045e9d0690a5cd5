"""Triton's interpreter: chosen before the first import of triton, which Megatron imports. Hence a process."""

import os

import numpy as np
import torch


def choose_interpreter() -> None:
    """Choose Triton's interpreter at the start of the process."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # NaN and Inf are part of the tests
