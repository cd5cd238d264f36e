"""A round of all peers and the loop around it; simulated peers, their faults, and their start."""
