"""GGUF files as models: their headers, blocks, names and tokenizers."""
