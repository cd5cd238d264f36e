"""The store that volunteers share: four verbs, over a folder, S3 or signed addresses."""
