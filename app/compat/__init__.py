"""Private interfaces of other libraries, one module a library: each with its reason, the versions seen to work, and a
test."""
