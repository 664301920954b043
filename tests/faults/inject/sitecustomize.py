"""Faults at named points, without a hook in the code that they strike: this folder stands on PYTHONPATH, so that every
Python process imports this file before anything else.

AREAL_FAULTS is a JSON list of faults: `name`, `target` ("package.module:Qual.name"), `when` (enter or exit), `nth` (the
call of it in one process, from 1), `process` (a pattern in the command line), `where` (a pattern in the arguments, or
empty: calls that lack it do not count), `action` (kill, stop, exit, enospc, delay), and `marker`, a file: who makes it
strikes, nobody else ever. Imports nothing before it knows that there is something to do here.
"""

import os

if os.environ.get("AREAL_FAULTS"):
    import functools
    import importlib.abc
    import importlib.machinery
    import importlib.util
    import inspect
    import json
    import re
    import signal
    import sys
    import threading
    import time

    class Fault:
        def __init__(self, values):
            self.module, _, self.path = values["target"].partition(":")
            self.when, self.nth, self.where = values["when"], values["nth"], re.compile(values["where"])
            self.action, self.marker = values["action"], values["marker"]
            self.calls = 0
            self.lock = threading.Lock()

        def reached(self, when, args, kwargs):
            if when != self.when or not self.where.search(repr((args, kwargs)) if self.where.pattern else ""):
                return
            with self.lock:
                self.calls += 1
                if self.calls < self.nth:
                    return
                try:
                    fd = os.open(self.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                except FileExistsError:
                    return
                os.write(fd, str(os.getpid()).encode())
                os.close(fd)
            self.strike()

        def strike(self):
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.action == "exit":
                os._exit(1)
            elif self.action == "enospc":
                raise OSError(28, "No space left on device")
            else:
                time.sleep(float(self.action.removeprefix("delay:")))

        def wrap(self, module):
            *outer, name = self.path.split(".")
            holder = functools.reduce(getattr, outer, module)
            found = inspect.getattr_static(holder, name)
            function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found

            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def wrapped(*args, **kwargs):
                    self.reached("enter", args, kwargs)
                    result = await function(*args, **kwargs)
                    self.reached("exit", args, kwargs)
                    return result

            else:

                @functools.wraps(function)
                def wrapped(*args, **kwargs):
                    self.reached("enter", args, kwargs)
                    result = function(*args, **kwargs)
                    self.reached("exit", args, kwargs)
                    return result

            kind = type(found) if isinstance(found, (classmethod, staticmethod)) else lambda made: made
            setattr(holder, name, kind(wrapped))

    class Finder(importlib.abc.MetaPathFinder):
        """Finds the modules of faults as the others do, and wraps their functions once they are executed."""

        def __init__(self, faults):
            self.faults = faults

        def find_spec(self, fullname, path, target=None):
            faults = [fault for fault in self.faults if fault.module == fullname]
            if not faults:
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
            if spec is None or spec.loader is None:
                return None
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                for fault in faults:
                    fault.wrap(module)

            spec.loader.exec_module = exec_module
            return spec

    _command = " ".join(sys.orig_argv)
    _faults = [Fault(one) for one in json.loads(os.environ["AREAL_FAULTS"]) if re.search(one["process"], _command)]
    if _faults:
        sys.meta_path.insert(0, Finder(_faults))
