"""Simulated peers: their rounds, their faults, and what a training begins with."""
