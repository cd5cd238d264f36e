"""`lockstep check`: what a run will need and would lack, looked at before any of it runs."""
