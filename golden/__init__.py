"""Golden files: loading, verification, generation and difference."""
