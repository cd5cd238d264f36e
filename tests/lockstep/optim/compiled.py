"""An optimizer with compiled functions, and rounds of some peers with it."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree, align


def compiled(optimizer: Optimizer) -> Optimizer:
    """Op by op, XLA would compile every operation alone."""
    names = ("init", "align", "lookahead", "accumulate", "send", "receive")
    return optimizer._replace(**{name: jax.jit(getattr(optimizer, name)) for name in names})


class Peers:
    """The params of all, and the peers' own states."""

    def __init__(self, optimizer: Optimizer, params: Tree, count: int = 1):
        self.optimizer, self.params = compiled(optimizer), params
        own, self.shared = self.optimizer.init(params)
        self.own = [own] * count

    def ahead(self, peer: int, step: float) -> Tree:
        """Where a peer takes its gradient."""
        return self.optimizer.lookahead(self.params, self.own[peer], self.shared, step)

    def accumulate(self, peer: int, grads: Tree, step: float) -> None:
        """Take a local step."""
        self.own[peer] = self.optimizer.accumulate(grads, self.own[peer], self.params, step)

    def align(self, peer: int, step: int) -> None:
        """Adopt the result of the round before."""
        self.own[peer] = align(self.optimizer, self.own[peer], self.params, step)

    def send(self, peer: int, step: int) -> Tree:
        """A peer's message."""
        own = self.own[peer]
        message, self.own[peer] = self.optimizer.send(own, self.params, self.shared, step)
        return message

    def train(self, targets: np.ndarray, steps: int, step: int) -> list[Tree]:
        """Take local steps of all peers, each drawn to its target; their messages."""
        for peer, target in enumerate(targets):
            for _ in range(steps):
                self.accumulate(peer, {"w": self.ahead(peer, step)["w"] - target}, step)
        return [self.send(peer, step) for peer in range(len(targets))]

    def receive(self, messages: list[Tree], step: int, weight: list[int] | None = None) -> Tree:
        """The update by the messages of all peers, of which those of weight 0 are absent."""
        peers = RoundPeers.synchronous(jnp.int32(weight or [1] * len(messages)))
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *messages)
        updates, self.shared = self.optimizer.receive(
            stacked, peers, self.params, self.shared, step
        )
        self.params = jax.tree.map(jnp.add, self.params, updates)
        return updates
