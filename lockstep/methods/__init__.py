"""Methods of training by their names: their tables, and the optimizers that these build."""
