"""Products that come off: delete the folder of one, and its lines in dvc.yaml."""
