"""Text: found, split into documents, tokenized; for `data_location.Corpus`."""
