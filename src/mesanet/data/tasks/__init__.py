"""Synthetic tasks: small generators, each batch a pure function of task, seed and step."""
