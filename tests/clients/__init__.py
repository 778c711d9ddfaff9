"""Other people's clients, unchanged, against a server: `make clients`."""
