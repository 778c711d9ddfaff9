"""Chat templates: rendered in a bounded sandbox, from conversations arranged as the template accepts them."""
