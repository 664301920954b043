"""For vLLM's processes, in vLLM's environment: a worker extension that counts what an update reads of its file."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_core.models import verified


class Counting:
    """Its methods are routes of `/collective_rpc`, which asks the workers of all ranks."""

    def count_reads(self):
        self._reads = _Reads()
        self._reads.__enter__()

    def reads(self):
        """Bytes of the file that this worker has copied since, files that it has hashed, and whether one is still
        mapped; it counts no more."""
        self._reads.__exit__(None, None, None)
        with open("/proc/self/maps") as maps:
            mapped = any(line.rstrip().endswith("/model.safetensors") for line in maps)
        return {"bytes": self._reads.bytes, "hashed": hashed[0], "mapped": mapped}


class _Reads(TorchDispatchMode):
    """Counts what operations of this thread read of tensors that are mapped from a file of weights."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if not func.is_view and not (isinstance(result, torch.Tensor) and result.is_meta):
            read = [value for value in args if isinstance(value, torch.Tensor) and _is_mapped(value)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in read)
        return result


def _is_mapped(tensor):
    if tensor.device.type != "cpu":
        return False
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return line.rstrip().endswith("/model.safetensors")
    return False


def _counted(*version):
    hashed[0] += 1
    _check(*version)


hashed = [0]
_check, verified._check = verified._check, _counted
