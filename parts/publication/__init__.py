"""A publication: an export with what others need to check it, written, fetched and verified."""
