"""The live page of an ingress, and the state that it shows. No Ray here."""
