"""The forwarder as a process of its own: `python -m areal_core.tracking --run-dir D`.

Exits with 0 when the outbox has ended and all is sent (or was tried for tracking.flush_timeout_s), with 143 when it was
told to end before. Running it again on a finished run's folder sends what is left.
"""

from __future__ import annotations

import logging
import signal
import sys

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    # Blocked, and taken only while the forwarder waits: a signal interrupts nothing, and none is lost in the seconds of
    # imports, which come after, since they start threads and a signal goes to any thread that does not block it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    from areal_core.launch import heartbeat, logs
    from areal_core.launch.process import adopt, announce_ready
    from areal_core.storage.rundir import RunDir
    from areal_core.tracking.forwarder import Forwarder
    from areal_core.tracking.outbox import Outbox

    run_dir = RunDir.of_command_line()
    logs.start("tracker")
    ready_file = run_dir.ready_file("tracker")
    adopt(ready_file)

    info = run_dir.info()
    if info.tracking_uri is None or info.tracking_run_id is None:
        logging.getLogger(__name__).error("tracking.enabled: this run is not tracked")
        return 2
    outbox = Outbox(run_dir.outbox, info.run_id)
    forwarder = Forwarder(outbox, info.tracking_uri, info.tracking_run_id, run_dir.config().tracking.flush_timeout_s)
    announce_ready(ready_file)
    heartbeat.say("sending what the outbox holds", waits_for="MLflow")  # whose requests have bounds of their own
    return 0 if forwarder.run(_stop_signal_within) else 128 + signal.SIGTERM


def _stop_signal_within(seconds: float) -> bool:
    return signal.sigtimedwait(_STOP_SIGNALS, seconds) is not None


if __name__ == "__main__":
    sys.exit(main())
