"""How a kernel is run: schedules, and their cost on a machine."""
