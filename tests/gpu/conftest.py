"""Tests of the CUDA path. `pytest -m gpu tests/gpu`; skipped by name where there is no GPU."""

import os
import sys

import pytest
import torch

from areal_core.errors import ProcessError

VLLM_PYTHON = os.environ.get("AREAL_VLLM_PYTHON", sys.executable)


def pytest_collection_modifyitems(items):
    reason = None if torch.cuda.is_available() else "needs a CUDA device, and torch sees none"
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def full_precision():
    """Float32 products, not TF32's: comparisons are to 1e-4."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter of an environment with vLLM for GPUs; AREAL_VLLM_PYTHON names one other than this."""
    from areal_core.generation.vllm.server import check_installed  # tests of training run without what it needs

    try:
        distribution = check_installed(VLLM_PYTHON)
    except ProcessError as error:
        pytest.skip(f"needs vLLM for GPUs: {error}")
    if distribution != "vllm":
        pytest.skip(f"needs vLLM for GPUs, {VLLM_PYTHON} has {distribution}")
    return VLLM_PYTHON
