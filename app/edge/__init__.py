"""The edge of the HTTP server: admission control, API keys, rate limits, sizes, the request log. No Ray, no engine."""
