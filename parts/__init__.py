"""Products that come off: delete the folder of one, and its lines in dvc.yaml.

Budget: 22,305 lines of Python, of which each part's README states its own.
"""
