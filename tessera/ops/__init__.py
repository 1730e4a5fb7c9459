"""What operators mean."""
