"""Everything that imports Ray: the ingress, the engine replica."""
