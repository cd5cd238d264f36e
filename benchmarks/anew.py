"""What it costs that peers begin their own states anew: `python -m benchmarks.anew --every 50`.

    lockstep download && lockstep convert
    python -m benchmarks.anew --every 0      # never, for comparison
    python -m benchmarks.anew --every 50

An audit of a run over a store needs a peer's own state at both ends of a window. If every peer
begins its own state anew there, nobody has to upload one. Prints a JSON line: the held-out loss
in the course of the run, nats per token. Nothing of the run is written.
"""

import argparse
import json
from pathlib import Path

from pipeline import runfile
from pipeline.stage import devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--every", type=int, required=True, help="rounds of a window; 0: never")
    asked = parser.parse_args()
    run = runfile.load(asked.run)
    devices.prepare(run)
    curve = train(run, asked.root, asked.every)
    print(json.dumps({"benchmark": "anew", "every": asked.every, "held_out_loss": curve}))


def train(run: runfile.Run, root: Path, every: int) -> dict[int, float]:
    """Return the held-out loss after some rounds, of a run whose own states begin anew."""
    import jax

    from lockstep.swarm.faults import FaultSchedule
    from lockstep.swarm.peers import make_peers
    from lockstep.swarm.swarm import Swarm
    from pipeline.language_model import held_out
    from pipeline.start import begin

    shards = root / "data/shards"
    setup = begin.read(run, root / "data/init", shards)
    peers = make_peers(setup.programs, run.peers.layout, setup.start.state, jax.devices())
    faults = FaultSchedule([], run.peers.seed, setup.programs.form)
    swarm = Swarm(setup.settings, peers, lambda _: setup.data, faults)
    rows_NW = held_out.read(run, shards).rows_NW
    progress, curve = setup.start.progress(setup.settings), {}
    for step in range(1, run.config.total_steps + 1):
        progress, _ = swarm.take_round(progress)
        if every and step % every == 0:
            for peer in range(run.peers.count):
                peers.restart(peer)
        if step == run.config.total_steps or step % run.held_out.every == 0:
            loss = held_out.mean_loss(peers.measure, rows_NW, setup.settings.micro_batch)
            curve[step] = round(loss.mean, 4)
    return curve


if __name__ == "__main__":
    main()
