"""A matched experiment: arms of configurations times seeds, run in turns, and what the differences are worth.

    plan -> trials -> measures -> statistics -> report (figures, page, trace)

Knows no Prefect; `flows.compare` is the flow around it, and benchmarks call it as it is.
"""
