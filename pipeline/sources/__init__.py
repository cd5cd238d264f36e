"""Where shards come from: `provider.py` names one provider for each data location."""

from pipeline.sources.provider import fetch, provider_of, source_sha256, survey

__all__ = ["fetch", "provider_of", "source_sha256", "survey"]
