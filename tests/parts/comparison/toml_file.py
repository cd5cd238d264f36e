"""The tables of a file of `lockstep compare`, of which tests/test_docs.py finds examples."""

from parts.comparison.compare_file import Compare

TABLES = Compare.model_fields.keys()
