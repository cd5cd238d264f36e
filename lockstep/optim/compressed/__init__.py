"""Optimizers whose peers send a few coefficients of their momentum: DeMo and DisTrO."""
