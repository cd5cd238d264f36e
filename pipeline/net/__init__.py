"""One file at an address: requests, retries, credentials, the content store and streams."""
