"""The truth: the mathematics of the DeepSeek-V4.1 transformer layer, its configuration, weights and state table."""
