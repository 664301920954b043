"""The embedded generation server, with steps that take long while a file exists: what a test does in the middle of
completions comes in time however busy the machine is. `slow_vllm` is the same for vLLM.

python -m tests.support.slow OPTIONS of areal_core.generation.server.routes
"""

import os
import sys
import time

FILE = "AREAL_TEST_SLOW_WHILE"  # environment variable with the file's path
STEP_S = 0.02


def wait() -> None:
    if os.path.exists(os.environ[FILE]):
        time.sleep(STEP_S)


if __name__ == "__main__":
    from areal_core.generation.engines.embedded import Engine
    from areal_core.generation.server import routes

    step = Engine.step

    def slow_step(engine: Engine) -> object:
        wait()
        return step(engine)

    Engine.step = slow_step  # type: ignore[method-assign]
    sys.exit(routes.main())
