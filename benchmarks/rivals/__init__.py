"""What Folio is measured against."""
