"""What `rows` finds in programs."""
