"""The forwarder as its own process: `python -m areal_core.tracking --run-dir D`.

Exits with 0 once the outbox has ended and is sent, or after trying for tracking.flush_timeout_s. Exits with 143 if it
is stopped earlier. On the folder of a finished run it sends the remaining items.
"""

from __future__ import annotations

import logging
import signal
import sys

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    # Block the signals and receive them only while the forwarder waits. So they interrupt nothing, and none is lost.
    # Imports come afterwards: they start threads, and any thread that does not block a signal may receive it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    from areal_core.launch import heartbeat, logs
    from areal_core.launch.process import announce_ready, tie_to_parent
    from areal_core.storage.rundir import RunDir
    from areal_core.tracking.forwarder import Forwarder
    from areal_core.tracking.outbox import Outbox

    run_dir = RunDir.of_command_line()
    logs.start("tracker")
    ready_file = run_dir.ready_file("tracker")
    tie_to_parent(ready_file)

    info = run_dir.info()
    if info.tracking_uri is None or info.tracking_run_id is None:
        logging.getLogger(__name__).error("tracking.enabled: this run has no MLflow run to send metrics to")
        return 2
    outbox = Outbox(run_dir.outbox, info.run_id)
    forwarder = Forwarder(outbox, info.tracking_uri, info.tracking_run_id, run_dir.config().tracking.flush_timeout_s)
    announce_ready(ready_file)
    heartbeat.report("sending queued metrics", waits_for="MLflow")  # requests to MLflow have their own time limits
    sent = forwarder.run(lambda seconds: signal.sigtimedwait(_STOP_SIGNALS, seconds) is not None)
    return 0 if sent else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
