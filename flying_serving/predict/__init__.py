"""What steps cost, what arrives, and what follows from both. Pure."""
