"""An emulated cloud: AWS's API (moto's server) whose instances are machines, as far as namespaces can be one.

`cloud.EmulatedCloud` is what tests use; `python -m tests.emulated_cloud` starts one by hand (`make cloud`).

- `daemon` is a process of its own, which holds everything together, and does what `EmulatedCloud` asks for
- `proxy` stands before moto: faults of its calls, and what AWS does and moto doesn't
- `machines` makes a machine of every running instance, and tells it what it is; `init` is the first process in it
"""

from tests.emulated_cloud.cloud import EmulatedCloud, Start, missing

__all__ = ["EmulatedCloud", "Start", "missing"]
