"""The store that volunteers share: four verbs, over a folder, S3, Google's storage or addresses."""
