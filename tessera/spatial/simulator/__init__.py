"""The judge of listings: runs them on data, cycle by cycle as they say, and refuses the first violation."""
