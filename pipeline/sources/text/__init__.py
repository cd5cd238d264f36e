"""Text files split into documents and tokenized, for `data_location.Corpus`."""
