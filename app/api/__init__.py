"""The OpenAI API: bodies, chat templates, answers. No Ray."""
