"""What burn_p2p brings: params as packs, and local steps by an optimizer of the workload's own."""
