"""Quantizers: arrays rounded to fewer bits, which is what peers then send."""
