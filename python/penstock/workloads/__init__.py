"""Models and data that the demo and the bench train."""
