"""The training of the built-in model: corpus, tokenizer and weights. A server does not need it."""
