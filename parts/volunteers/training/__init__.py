"""What a process of a run does: it trains or follows, round after round."""
