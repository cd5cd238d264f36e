"""What returning the allocator's unused memory to the kernel saves and costs while a run trains.

    python -m benchmarks.trim ROOT --every 25

trains the run of params/run.toml below ROOT, where `lockstep download` and `lockstep convert` of it
have run, and trims every so many rounds (0: never, as stage train does after it has compiled). One
line of JSON: MB resident at the peak and at the end, CPU seconds, page faults.
"""

import argparse
import ctypes
import json
import resource
from pathlib import Path

from benchmarks.resident import STATUS
from lockstep.machine import allocator
from pipeline.stage.keys import RUN_FILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--every", type=int, default=25)
    asked = parser.parse_args()
    allocator.tune()
    from pipeline import __main__ as command_line
    from pipeline.monitor.monitor import Terminal

    kept = Terminal.kept

    def trimmed(terminal, entry, progress):
        kept(terminal, entry, progress)
        if asked.every and entry.round.step % asked.every == 0:
            ctypes.CDLL(None).malloc_trim(0)

    Terminal.kept = trimmed
    command_line._stage("train", Path(RUN_FILE), asked.root)
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    peak, now = (round(int(lines[name].split()[0]) / 1000) for name in ("VmHWM", "VmRSS"))
    used = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "trimmed_every": asked.every,
        "peak_mb": peak,
        "resident_mb": now,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "page_faults": used.ru_minflt,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
