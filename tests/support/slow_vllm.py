"""For vLLM's process, in vLLM's environment: what `slow` does, as a logits processor that leaves logits alone."""

from vllm.v1.sample.logits_processor import LogitsProcessor

from tests.support import slow


class Slow(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False  # others are left out for greedy requests

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        slow.wait()
        return logits
