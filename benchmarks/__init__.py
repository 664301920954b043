"""One runnable module a question: `python -m benchmarks.NAME`. The last line printed is one JSON object."""
