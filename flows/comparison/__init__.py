"""A matched experiment: arms of configurations times seeds, run in turns, and what the differences are worth.

    design -> trials -> measures, intervals -> report

`design` also keeps what was asked for in a folder, `parent` is its run in MLflow. Knows no Prefect: `flows.compare` is
the flow around it, and benchmarks call it as it is.
"""
