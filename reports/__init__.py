"""Benchmark history, roofline and the dashboard."""
