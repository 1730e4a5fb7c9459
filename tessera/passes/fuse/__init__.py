"""Which equations are computed in one kernel."""
