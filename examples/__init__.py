"""Applications that use Folio."""
