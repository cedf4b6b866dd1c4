"""One thread: the matrices are small, and a second thread waits more than it works."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
