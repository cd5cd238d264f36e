"""Local steps by a workload's own optimizer, in its worker or by a command."""
