"""HTTP API: bodies, routes and answers of OpenAI, Anthropic, batches and operators."""
