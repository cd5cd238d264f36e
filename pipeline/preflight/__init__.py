"""`lockstep check`: what a run needs and lacks, before any of it runs."""
