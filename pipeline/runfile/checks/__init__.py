"""What tables of a run file must agree on, where several files ask for it."""
