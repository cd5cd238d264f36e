"""`lockstep new`: a whole run file whose numbers fit each other, and why each has its value."""
