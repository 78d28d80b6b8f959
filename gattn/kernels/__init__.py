"""Attention as pure functions of arrays: no parameters, and no imports but jax, numpy and the standard library."""
