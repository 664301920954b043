"""A matched comparison: arms times seeds, run in turns, with confidence intervals of the differences.

    design -> trials -> measures, intervals -> report

`design` also stores the plan in the comparison's folder; `parent` is the comparison's own run in MLflow. The package
does not use Prefect: `flows.compare` is its flow, and benchmarks call the package directly.
"""
