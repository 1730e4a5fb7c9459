"""Looking at a program that was simulated: what is busy, what waits for what, and where the time goes."""
