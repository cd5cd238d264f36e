"""A round without arrays, files or networks: elections, states, consensus, simulated time."""
