"""The edge of the HTTP server: who may call, and how much. Knows neither Ray nor the engine."""
