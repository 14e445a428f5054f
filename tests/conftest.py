"""Every test runs in float64, with shape annotations enforced and with deterministic kernels."""

import pytest
import torch
from jaxtyping import install_import_hook

# Must come before any import of the package: the hook wraps modules as they are imported.
install_import_hook("pgprog", "beartype.beartype")


@pytest.fixture(autouse=True)
def float64_and_one_thread():
    """float64 by default; one thread, as runs have."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
