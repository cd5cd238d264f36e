"""`lockstep try`: Psyche's `train` example, one model trained alone with AdamW or with DisTrO."""
