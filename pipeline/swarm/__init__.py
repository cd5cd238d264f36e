"""The swarm: who takes part in a round, what they commit to, and who attests to it."""
