"""Where buffers lie: addresses from lifetimes, and a checker that proves them."""
