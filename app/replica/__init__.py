"""One replica: the requests, figures and additions of its shelf of models. No Ray."""
