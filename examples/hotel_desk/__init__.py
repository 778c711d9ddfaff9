"""A hotel desk: a deployment that knows the keys of rooms, one that talks to guests, and Folio, which they ask."""
