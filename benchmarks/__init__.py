"""Measurements of speed and memory; each module runs by ``python -m benchmarks.NAME``."""
