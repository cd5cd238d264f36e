"""Scripts that print one JSON line each; none is a test, and no test times anything."""
