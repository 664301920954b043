"""`python -m tests.emulated_cloud`: an emulated cloud by hand, until it is asked to end.

With `--serve OPTIONS` it is the daemon of an `EmulatedCloud`, which starts it.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from areal_core.errors import ConfigError
from areal_core.run.command import Parser, run_command
from tests.emulated_cloud.cloud import EmulatedCloud, missing
from tests.emulated_cloud.daemon import Options, serve
from tests.support.terraform import emulated_infra

_TEXT = """\
The emulated cloud is there, until Ctrl-C. Whoever uses it has to be on its control host, {address}:

    {enter}

There, with these variables, the tools of AWS and terraform talk to it:

    {variables}

Terraform's root modules, without what it lacks: {infra}
What each machine says: {folder}/logs/INSTANCE.log; when they started and ended: {folder}/starts.jsonl
A fault: curl {endpoint}/emulated/reclaim -d '{{"instance": "i-...", "notice_s": 120}}'
"""


def main() -> int:
    parser = Parser(prog="python -m tests.emulated_cloud", description=__doc__)
    parser.add_argument("--serve", metavar="OPTIONS", help="as JSON")
    options = parser.parse_args()
    if options.serve is not None:
        serve(msgspec.json.decode(options.serve, type=Options))
        return 0
    return run_command(_by_hand)


def _by_hand() -> None:
    if lack := missing():
        raise ConfigError(f"an emulated cloud {lack}")
    with tempfile.TemporaryDirectory(prefix="areal-cloud-") as made, EmulatedCloud(folder := Path(made)) as cloud:
        text = _TEXT.format(
            address=cloud.address,
            enter=f"ip netns exec {cloud.control_host} bash",
            variables="\n    ".join(f"export {name}={value}" for name, value in cloud.environment.items()),
            infra=emulated_infra(folder / "terraform"),
            folder=folder,
            endpoint=cloud.endpoint,
        )
        print(text, flush=True)
        while True:
            signal.pause()  # a signal that ends this process raises


if __name__ == "__main__":
    sys.exit(main())
