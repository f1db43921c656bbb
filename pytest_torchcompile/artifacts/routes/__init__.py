"""Each route in a file of its own."""
