"""What `python -m benchmarks.gpu` measures: a function for each section, which yields its lines.

Modules are imported once the devices are prepared. Figures come from the other benchmarks where
these have them.
"""
