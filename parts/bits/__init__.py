"""Which operation two machines disagree on: a step recorded by its operations, compared, judged."""
