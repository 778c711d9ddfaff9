"""Hotel desk example: a key register, a desk that answers guests, and Folio as a separate Serve application."""
