"""The control plane: Prefect flows, the composition of configurations, and the commands behind `make`. No algorithm."""
