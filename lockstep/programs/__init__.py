"""Jitted programs, and the devices they run on."""
