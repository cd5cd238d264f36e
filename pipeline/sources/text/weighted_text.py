"""`data_location.WeightedText`: several sources of text, mixed by weight; see text.py."""

from pipeline.sources.text.text import MAKES_TOKENS, fetch, survey

__all__ = ["MAKES_TOKENS", "fetch", "survey"]
