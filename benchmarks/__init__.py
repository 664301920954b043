"""One runnable module a question: `python -m benchmarks.NAME`. The last line printed is one JSON object,
whose `machine` says what it ran on: revision, processor, and GFLOP/s of one large product on a core of it."""
