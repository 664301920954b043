"""Benchmarks: one runnable module per question, `python -m benchmarks.NAME`.

The last line printed is one JSON object. Its `machine` has the revision, the processor, and the GFLOP/s of one large
matrix product on one core.
"""
