"""GGUF files as models: headers, names, config and tokenizer in the usual form. Imports no torch."""
