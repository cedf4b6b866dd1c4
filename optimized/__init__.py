"""The fast engine: packed caches, slots and pages, Triton kernels, recorded graphs."""
