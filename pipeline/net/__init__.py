"""Files at any address: requests, retries, credentials, a store of contents, and streams.

It imports nothing of Lockstep: README.md says how to use it alone.
"""
