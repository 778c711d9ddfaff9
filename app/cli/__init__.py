"""The command `folio`: a module for each of its commands. Modules import what is heavy inside their functions, so that
`folio --help` and shell completion answer at once."""
