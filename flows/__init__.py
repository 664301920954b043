"""Control plane: Prefect flows, configuration with Hydra, and the commands of `areal`.
It contains no algorithm.
"""
