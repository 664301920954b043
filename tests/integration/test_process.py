"""The child's side: it ends with its parent, and in order."""

import os
import select
import subprocess
import sys

import pytest

PATIENCE_S = 120.0

# A parent that starts a child, which is tied to it and then sleeps; the parent prints the child's pid once it is tied.
CHILD = """from areal_core.launch import process; process.tie_to_parent()
print('tied', flush=True); import time; time.sleep(600)"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_process_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert select.select([child], [], [], PATIENCE_S)[0]
    os.close(child)


# A thread inside torch's native code, which wants the interpreter back while that is being torn down.
IN_NATIVE_CODE = """
import threading, time
from datetime import timedelta
from torch.distributed import HashStore
from areal_core.launch import process
threading.Thread(target=HashStore().wait, args=(["never"], timedelta(seconds=3)), daemon=True).start()
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(6)
slow = Slow()
time.sleep(0.1)
def main():
    print("done")
    return 3
"""


def ended(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_threads_of_torch_abort_no_process_that_ends() -> None:
    child = ended(f"{IN_NATIVE_CODE}\nprocess.run_and_exit(main)")
    assert (child.returncode, child.stdout, child.stderr) == (3, "done\n", "")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("return 2", 2, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise ValueError('a bug')", 1, "ValueError: a bug"),
    ],
)
def test_end_with_keeps_the_exit_status_and_what_was_said(body: str, status: int, said: str) -> None:
    code = f"import atexit; from areal_core.launch import process; atexit.register(print, 'end')\ndef main(): {body}\n"
    child = ended(f"{code}process.run_and_exit(main)")
    assert (child.returncode, child.stdout) == (status, "end\n")
    assert said in child.stderr
