"""Faults at named points, without a hook in the code that they strike: this folder stands on PYTHONPATH, so that every
Python process imports this file before anything else.

AREAL_FAULTS is a JSON list of faults: `name`, `target` ("package.module:Qual.name"), `when` (enter or exit), `nth` (the
call of it in one process, from 1), `process` (a pattern in the command line), `where` (a pattern in the arguments, or
empty: calls that lack it do not count), `action` and `marker`, a file: who makes it strikes, nobody else ever. With
`chance` and `seed` every call from the `nth` on is struck with that probability, and the marker grows by a byte a time.

Actions: kill; reset, an error that is raised; delay:SECONDS; echo: an earlier call of the same object is made once
more. Imports nothing before it knows that there is something to do here.
"""

import os

if os.environ.get("AREAL_FAULTS"):
    import functools
    import importlib.abc
    import importlib.machinery
    import importlib.util
    import inspect
    import json
    import random
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
            self.chance = values.get("chance")
            self.random = random.Random(f"{values.get('seed')} {values['name']} {_command}")
            self.calls = 0
            self.earlier = {}  # object -> arguments of its calls
            self.lock = threading.Lock()

        def reached(self, when, function, args, kwargs):
            if when != self.when or not self.where.search(repr((args, kwargs)) if self.where.pattern else ""):
                return
            with self.lock:
                self.calls += 1
                again = self.again(args) if self.action == "echo" else None
                if self.calls < self.nth or (self.action == "echo" and again is None) or not self.due():
                    return
            self.strike(function, again)

        def again(self, args):
            """The arguments of an earlier call of the same object; None where there was none."""
            earlier = self.earlier.setdefault(id(args[0]), [])
            earlier.append(args)
            return self.random.choice(earlier[:-1]) if len(earlier) > 1 else None

        def due(self):
            """Whether this call is struck; noted in the marker."""
            if self.chance is not None and self.random.random() >= self.chance:
                return False
            try:
                fd = os.open(self.marker, os.O_CREAT | os.O_APPEND | os.O_WRONLY | (self.chance is None and os.O_EXCL))
            except FileExistsError:
                return False
            os.write(fd, b"!" if self.chance is not None else str(os.getpid()).encode())
            os.close(fd)
            return True

        def strike(self, function, again):
            if self.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.action == "reset":
                raise ConnectionResetError(104, "Connection reset by peer")
            elif self.action == "echo":
                try:
                    function(*again)
                except Exception as error:  # noqa: BLE001 - nobody has asked for it
                    sys.stderr.write(f"echo of {again[1:3]} refused: {error}\n")
            else:
                time.sleep(float(self.action.removeprefix("delay:")))

        def wrap(self, module):
            *outer, name = self.path.split(".")
            holder = functools.reduce(getattr, outer, module)
            found = inspect.getattr_static(holder, name)
            function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found

            if inspect.iscoroutinefunction(function):

                async def around(*args, **kwargs):
                    self.reached("enter", function, args, kwargs)
                    result = await function(*args, **kwargs)
                    self.reached("exit", function, args, kwargs)
                    return result

                wrapped = around
            else:

                def directly(*args, **kwargs):
                    self.reached("enter", function, args, kwargs)
                    result = function(*args, **kwargs)
                    self.reached("exit", function, args, kwargs)
                    return result

                wrapped = directly
            functools.update_wrapper(wrapped, function)

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
