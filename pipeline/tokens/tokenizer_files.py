"""The files that a tokenizer in Hugging Face form may consist of."""

# Nothing else is fetched or copied: no code, no pickle.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)
