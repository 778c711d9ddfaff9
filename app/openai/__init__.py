"""The OpenAI API's side of things: bodies, chat templates, errors. No Ray here."""
