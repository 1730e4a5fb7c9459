"""Programs for spatial machines: a page of instructions for every core, and what runs them."""
