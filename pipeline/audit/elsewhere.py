"""A process in which bits differ: it replays a window honestly, and tells its messages.

    python -m pipeline.audit.elsewhere FOLDER

FOLDER has what honest.py asks for, and gets `messages.bin`. The process computes on the CPU with
another number of threads and other vector instructions than the process that asks; JAX reads both
when it is imported.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.files import read_json
from pipeline import runfile
from pipeline.stage import devices

ASKED, TOLD, TOKENS = "asked.json", "messages.bin", "tokens.safetensors"
ISA = "--xla_cpu_max_isa="


class Other:
    """Settings under which bits differ from those that are set: `threads`, and XLA's `flags`."""

    def __init__(self, environment: Mapping[str, str]):
        flags = environment["XLA_FLAGS"].split()
        widest = [flag for flag in flags if not flag.startswith(ISA)]
        limited = widest != flags
        self.threads = "4" if environment["NPROC"] == "1" else "1"
        self.flags = " ".join(widest if limited else [*widest, f"{ISA}AVX"])
        isa = "the CPU's widest vector instructions" if limited else "AVX instructions"
        self.words = f"{isa} and {self.threads} thread{'' if self.threads == '1' else 's'}"

    def set(self) -> None:
        """Set them in this process, which has not imported JAX."""
        os.environ |= {
            "NPROC": self.threads,
            "XLA_FLAGS": self.flags,
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_PLATFORMS": "cpu",
        }


def main(folder: Path) -> None:
    """Replay the window that is asked for in a folder, and write the messages there."""
    asked = read_json(folder / ASKED)
    run = runfile.parse(asked["run"], ASKED)
    devices.prepare(run)
    Other(os.environ).set()
    if asked["compiled"]:
        devices.keep_compiled(Path(asked["compiled"]))
    from pipeline.audit import honest

    honest.tell(run, asked, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
