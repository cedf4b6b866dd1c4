"""Shared by the reference's tests: the toy model, its weights, and token strings."""

from __future__ import annotations

import pytest
import torch

from reference.config import V41Config
from reference.engine import ReferenceEngine
from reference.weights import RandomWeights

SEED = 7


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # toy widths lose time to a thread pool


@pytest.fixture(scope="session")
def toy() -> V41Config:
    return V41Config.toy()


@pytest.fixture(scope="session")
def toy_weights(toy: V41Config) -> RandomWeights:
    return RandomWeights(toy, SEED)


@pytest.fixture(scope="session")
def release(toy: V41Config, toy_weights: RandomWeights) -> ReferenceEngine:
    return ReferenceEngine(toy, toy_weights)


@pytest.fixture(scope="session")
def float64(toy: V41Config, toy_weights: RandomWeights) -> ReferenceEngine:
    return ReferenceEngine(toy, toy_weights, precision="float64")


@pytest.fixture(scope="session")
def unquantized(toy: V41Config, toy_weights: RandomWeights) -> ReferenceEngine:
    return ReferenceEngine(toy, toy_weights, precision="float64", cache_quantizers=False)
