"""A model's tensors by name, wherever they come from.

tensor_specs(config)              names, shapes, formats             weight_specs.py
RandomWeights(config, seed)       drawn from (seed, name)            random_weights.py
DictWeights(config, tensors)      in memory                          weight_source.py
CheckpointWeights(path, config)   safetensors files, read lazily     checkpoint.py
"""

from reference.checkpoint import CheckpointWeights
from reference.random_weights import RandomWeights
from reference.weight_source import DictWeights, Weights, check_token_map
from reference.weight_specs import TensorSpec, model_bytes, spec_of, tensor_specs

__all__ = [
    "CheckpointWeights",
    "DictWeights",
    "RandomWeights",
    "TensorSpec",
    "Weights",
    "check_token_map",
    "model_bytes",
    "spec_of",
    "tensor_specs",
]
